#include <cstdio>
#include <tessera.h>

int main() {
  using namespace tessera;
  Tensor x = raw::full({2, 3}, 1, kF32);
  std::vector<data::TokenId> ids = data::ByteTokenizer().encode("abc");
  std::printf("%s %zu %s\n", x.describe().c_str(), ids.size(), data::decode_utf8("a",0).value == 'a' ? "ok":"");
  try { data::read_idx("/nonexistent"); } catch (const Error& e) { std::puts(e.what()); }
  try { data::read_csv("/no"); } catch (const Error& e) { std::puts(e.what()); }
}
