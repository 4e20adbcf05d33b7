#include <tessera/data/csv.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  for (const CsvOptions& options :
       {CsvOptions{}, kTsv, CsvOptions{.separator = ';', .header = false}}) {
    fuzz::feed([&] {
      const CsvTable table = parse_csv(text, "input", options);
      size_t characters = 0;
      for (int64_t row = 0; row < table.num_rows(); ++row) {
        for (int64_t column = 0; column < table.num_columns(); ++column) {
          characters += table.cell(row, column).size();
        }
      }
      fuzz::require(characters <= text.size(), "cells are parts of the text");
    });
  }
}
