// What libtessera_sentencepiece.so gives: SentencePiece's library behind plain functions. Internal.
//
// Debian's library has a protobuf of its own inside, whose names are those of the protobuf that tessera links; in one
// namespace each calls the other's, and ends the program. So a module links it, and is loaded with RTLD_DEEPBIND, by
// which the library finds its own names first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

struct SentencePieceFunctions {
  // Takes what a call gives: ids, or the bytes of a text or message.
  using Ids = void (*)(void* target, const int* ids, size_t count);
  using Text = void (*)(void* target, const char* text, size_t size);
  enum Kind : int { kNormal, kUnknown, kControl, kByte };

  void* (*open)(const char* bytes, size_t size, Text message,
                void* target);  // null: the message says why
  void (*close)(void* model);
  int (*size)(const void* model);
  void (*piece)(const void* model, int id, Text text, void* target);
  Kind (*kind)(const void* model, int id);
  int (*unk)(const void* model);  // -1: none
  int (*bos)(const void* model);
  int (*eos)(const void* model);
  int (*pad)(const void* model);
  // False: the text is the message.
  bool (*encode)(const void* model, const char* text, size_t size, Ids ids, Text message,
                 void* target);
  bool (*decode)(const void* model, const int* ids, size_t count, Text text, void* target);
};

// Where the module may be, the first place first. `own`: the file of the library or program that asks;
// empty or without a folder, it says nothing.
std::vector<std::string> sentencepiece_folders(const std::string& own);

}  // namespace tessera::data

// The module's only name.
extern "C" const tessera::data::SentencePieceFunctions* tessera_sentencepiece_functions();
