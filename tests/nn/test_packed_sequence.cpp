// Packed sequences: how they lie, and that recurrent layers give each what it gives alone. Values
// of torch are in test_golden_modules.
#include <gtest/gtest.h>

#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/random.h>
#include <tessera/nn/recurrent/packed_sequence.h>
#include <tessera/nn/recurrent/recurrent.h>

namespace tessera::nn::test_packed_sequence {
namespace {

Tensor random(const Shape& shape, uint64_t stream = 0) {
  return randn(shape, {}, RandomStream{12, stream});
}
double largest_difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  return (a - b).abs().max().item();
}

TEST(PackedSequences, StandStepByStepTheLongestFirst) {
  const Tensor x = arange(12).view({4, 3, 1}).to(kF32);  // [L, N, 1]: 3 t + n
  const PackedSequence packed = pack_padded_sequence(x, {2, 4, 1}, false, false);
  EXPECT_EQ(packed.batch_sizes, (std::vector<int64_t>{3, 2, 1, 1}));
  EXPECT_EQ(packed.sorted_indices, (std::vector<int64_t>{1, 0, 2}));
  EXPECT_EQ(packed.data.to_vector(), (std::vector<double>{1, 0, 2, 4, 3, 7, 10}));
  const PaddedSequence padded = pad_packed_sequence(packed, true, -1, 5);
  EXPECT_EQ(padded.lengths, (std::vector<int64_t>{2, 4, 1}));
  EXPECT_EQ(padded.sequence.to_vector(),
            (std::vector<double>{0, 3, -1, -1, -1, 1, 4, 7, 10, -1, 2, -1, -1, -1, -1}));
}

TEST(PackedSequences, GradientsComeBackToWhatWasPackedAlone) {
  const Tensor x = random({3, 2, 2}).set_requires_grad();
  const PaddedSequence padded = pad_packed_sequence(pack_padded_sequence(x, {3, 1}));
  padded.sequence.sum().backward();
  EXPECT_EQ(x.grad().select(1, 0).to_vector(), std::vector<double>(6, 1));
  EXPECT_EQ(x.grad().select(1, 1).to_vector(), (std::vector<double>{1, 1, 0, 0, 0, 0}));
}

TEST(PackedSequences, EachSequenceGivesWhatItGivesAlone) {
  const RecurrentOptions options{.num_layers = 2, .bidirectional = true};
  LSTM lstm(3, 4, options);
  GRU gru(3, 4, options);
  RNN rnn(3, 4, options);
  const TensorList sequences = {random({2, 3}, 1), random({5, 3}, 2), random({3, 3}, 3)};
  const PackedSequence packed = pack_sequence(sequences, false);
  const PackedLstmResult together = lstm(packed);
  const PackedGruResult of_gru = gru(packed), of_rnn = rnn(packed);
  const Tensor outputs = pad_packed_sequence(together.output).sequence;
  for (size_t n = 0; n < sequences.size(); ++n) {
    const auto at = static_cast<int64_t>(n);
    const LstmResult alone = lstm(sequences[n]);
    const Tensor own = outputs.select(1, at).narrow(0, 0, sequences[n].size(0));
    EXPECT_LT(largest_difference(own, alone.output), 1e-6);
    EXPECT_LT(largest_difference(together.state.hidden.select(1, at), alone.state.hidden), 1e-6);
    EXPECT_LT(largest_difference(together.state.cell.select(1, at), alone.state.cell), 1e-6);
    EXPECT_LT(largest_difference(of_gru.hidden.select(1, at), gru(sequences[n]).hidden), 1e-6);
    EXPECT_LT(largest_difference(of_rnn.hidden.select(1, at), rnn(sequences[n]).hidden), 1e-6);
  }
}

TEST(PackedSequences, RefuseLengthsThatAreNone) {
  const Tensor x = random({3, 2, 2});
  EXPECT_THROW(pack_padded_sequence(x, {1, 3}), ValueError) << "not sorted";
  EXPECT_THROW(pack_padded_sequence(x, {3, 0}), ValueError);
  EXPECT_THROW(pack_padded_sequence(x, {4, 1}), ValueError);
  EXPECT_THROW(pack_padded_sequence(x, {3}), ValueError);
  const PackedSequence packed = pack_padded_sequence(x, {3, 1});
  EXPECT_THROW(pad_packed_sequence(packed, false, 0, 2), ValueError);
  EXPECT_THROW(LSTM(3, 4)(packed), ShapeError);
  EXPECT_THROW(GRU(2, 4)(packed, zeros({1, 3, 4})), ShapeError);
  EXPECT_THROW(pad_packed_sequence({x, {3, 1}}), ShapeError);
}

}  // namespace
}  // namespace tessera::nn::test_packed_sequence
