#include <gtest/gtest.h>

#include <tessera/core/shape.h>

#include <tessera/core/error.h>

namespace tessera::test_shape {
namespace {

TEST(Shape, ViewOfAContiguousTensorSplitsAndJoinsDimensions) {
  const Shape shape{4, 6, 5};
  Shape strides;
  ASSERT_TRUE(view_strides(shape, contiguous_strides(shape), {2, 2, 30}, strides));
  EXPECT_EQ(strides, (Shape{60, 30, 1}));
  ASSERT_TRUE(view_strides(shape, contiguous_strides(shape), {120, 1}, strides));
  EXPECT_EQ(strides[0], 1);
}

TEST(Shape, ViewAcrossAGapIsRefused) {
  Shape strides;
  EXPECT_FALSE(view_strides({4, 6}, {8, 1}, {24}, strides));
  ASSERT_TRUE(view_strides({4, 6}, {8, 1}, {2, 2, 3, 2}, strides));
  EXPECT_EQ(strides, (Shape{16, 8, 2, 1}));
}

TEST(Shape, ViewIgnoresStridesOfSizeOneDimensions) {
  Shape strides;
  ASSERT_TRUE(view_strides({4, 1, 6}, {6, 99, 1}, {24}, strides));
  EXPECT_EQ(strides, (Shape{1}));
  ASSERT_TRUE(view_strides({6, 1}, {3, 7}, {2, 3}, strides));
  EXPECT_EQ(strides, (Shape{9, 3}));
  ASSERT_TRUE(view_strides({1, 1}, {3, 7}, {1}, strides));
  EXPECT_FALSE(view_strides({2, 3}, {1, 2}, {6}, strides));
}

TEST(Shape, BroadcastNamesBothShapesWhenItFails) {
  EXPECT_EQ(broadcast_shapes({3, 1}, {4}, "add"), (Shape{3, 4}));
  EXPECT_EQ(broadcast_shapes({}, {2, 0}, "add"), (Shape{2, 0}));
  try {
    broadcast_shapes({3, 2}, {4}, "add");
    FAIL();
  } catch (const ShapeError& error) {
    EXPECT_NE(std::string(error.what()).find("[3, 2]"), std::string::npos);
  }
}

TEST(Shape, ElementCountsThatOverflowAreRefused) {
  EXPECT_THROW(checked_numel({int64_t{1} << 40, int64_t{1} << 40}, "test"), ShapeError);
  EXPECT_THROW(checked_numel({0, int64_t{1} << 40, int64_t{1} << 40}, "test"), ShapeError);
  EXPECT_EQ(checked_numel({0, int64_t{1} << 40}, "test"), 0);
  EXPECT_THROW(checked_numel({-1}, "test"), ShapeError);
}

TEST(Shape, DenseMeansOneBlockInSomeOrder) {
  EXPECT_TRUE(is_dense({2, 3}, {1, 2}));
  EXPECT_FALSE(is_dense({2, 3}, {4, 1}));
  EXPECT_FALSE(is_dense({2, 3}, {0, 1}));
}

}  // namespace
}  // namespace tessera::test_shape
