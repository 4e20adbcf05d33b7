// Every optimizer, and options for it that between them use all that it has. Of a row here are made
// the tests of state, masters and autocast (test_optim), of the GPU's bits (test_cuda_optim) and of
// torch's values (test_golden_optim).
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include <tessera/optim/optimizers.h>

namespace tessera::optim {

// kOptions<T>.front(): all states of T, at a rate at which three steps show.
template <class T>
inline const std::vector<typename T::Options> kOptions = {};
// clang-format off
template <> inline const std::vector<SGDOptions> kOptions<SGD> = {
    {.lr = 0.1, .momentum = 0.9, .nesterov = true},
    {.lr = 0.1},
    {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
    {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .maximize = true}};
template <> inline const std::vector<AdamOptions> kOptions<Adam> = {
    {.lr = 0.1, .weight_decay = 0.1}, {.lr = 0.01, .amsgrad = true, .maximize = true}};
template <> inline const std::vector<AdamWOptions> kOptions<AdamW> = {
    {.lr = 0.1, .amsgrad = true}, {.lr = 0.01}};
template <> inline const std::vector<AdagradOptions> kOptions<Adagrad> = {
    {.lr = 0.1, .initial_accumulator_value = 0.5},
    {.lr = 0.1, .lr_decay = 0.2, .weight_decay = 0.01, .initial_accumulator_value = 0.5}};
template <> inline const std::vector<RMSpropOptions> kOptions<RMSprop> = {
    {.lr = 0.05, .momentum = 0.5, .centered = true},
    {.lr = 0.01},
    {.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9, .centered = true}};
template <> inline const std::vector<LionOptions> kOptions<Lion> = {
    {.lr = 0.05, .weight_decay = 0.1}, {.lr = 0.01, .maximize = true}};
template <> inline const std::vector<AdadeltaOptions> kOptions<Adadelta> = {
    {.lr = 0.5}, {.lr = 1, .rho = 0.8, .weight_decay = 0.1, .maximize = true}};
template <> inline const std::vector<AdamaxOptions> kOptions<Adamax> = {
    {.lr = 0.05}, {.lr = 0.02, .weight_decay = 0.1, .maximize = true}};
template <> inline const std::vector<NAdamOptions> kOptions<NAdam> = {
    {.lr = 0.05, .weight_decay = 0.1},
    {.lr = 0.02, .weight_decay = 0.1, .decoupled_weight_decay = true, .maximize = true}};
template <> inline const std::vector<RAdamOptions> kOptions<RAdam> = {
    {.lr = 0.05, .betas = {0.9, 0.5}, .weight_decay = 0.1},
    {.lr = 0.05, .betas = {0.8, 0.9}, .weight_decay = 0.1, .decoupled_weight_decay = true},
    {.lr = 0.02, .maximize = true}};
// clang-format on

using OptimizerKinds =
    testing::Types<SGD, Adam, AdamW, Adagrad, RMSprop, Lion, Adadelta, Adamax, NAdam, RAdam>;

}  // namespace tessera::optim
