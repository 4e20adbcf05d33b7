"""What torch gives where docs/from-pytorch.md names another form: counterparts.{json,safetensors}.

One case a line of counterparts.json:
  {"name": "acosh", "inputs": {"x": "above_one"}, "outputs": ["float32"], "scale": 0.0}
or, where torch returns a bool or a number, {"value": ...} in place of outputs. The inputs are tensors of
counterparts.safetensors by name, shared among cases; the results stand there as NAME.CASE/0, NAME.CASE/1, ... Where
"writes", what x holds afterwards is the result, where "signs", signs of zeros count. A floating result is torch's in float64 from the same inputs; it has to be met
to a few eps of itself, and of `scale` where a sum or a difference of larger numbers is what torch computes as well.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from golden_io import as_list, dtype_name, save_tensors, write_lines

rng = np.random.default_rng(80)
inf, nan = math.inf, math.nan


def f32(values):
    return torch.tensor(np.asarray(values), dtype=torch.float32)


def normal(*shape):
    return f32(rng.standard_normal(shape))


def integers(low, high, *shape):
    return torch.from_numpy(rng.integers(low, high, shape))


def distinct(*shape):
    count = int(np.prod(shape))
    return f32((rng.permutation(count) - count // 2 + 0.5) / 8).reshape(shape)


# Where forms go wrong: signed zeros, infinities, NaN, what is tiny or huge, the ends of a domain and beside them.
SMALL = [0.0, -0.0, 1e-30, 1e-8, -1e-8, 3e-4, -3e-4]
LINE = [0.125, -0.75, 1.0, -1.0, 2.5, -3.25, 4.5, 7.0]
POOL = {
    "line": f32(SMALL + LINE + [inf, -inf, nan]),
    "finite": f32(SMALL + LINE),
    # Beyond 88.7 exp() overflows, of which cosh() and sinh() could give half.
    "exponents": f32(SMALL + LINE + [30.0, -30.0, 88.0, -88.0, inf, -inf, nan]),
    "huge": f32(SMALL + LINE + [1e10, -1e10, 1e20, -1e20, 3e38, inf, -inf, nan]),
    "huge_other": f32([0.0, 0.0, 1e-30, -0.0, 1e-8, 1, -1, 0.125, 2, 1e-30, -1e30, 3, 4, 0.5, -7, 1e10, 1, 1e20, 2e20, 1e38,
                       1, inf, 2]),
    "unit": f32(SMALL + [0.125, -0.75, 1.0, -1.0, 1 - 2**-23, -1 + 2**-23, 0.999, -0.999, 1.5, nan]),
    "probability": f32([0.0, 1e-30, 1e-8, 0.125, 0.5, 0.75, 1 - 2**-23, 1.0, nan]),
    "above_one": f32([1.0, 1 + 2**-23, 1 + 1e-6, 1.001, 1.5, 2, 30, 1e10, 1e20, 1e38, 0.5, inf, nan]),
    "signs": f32([1, -1, 0.0, -0.0, 2, -3, inf, -inf, 4, 5]),
    "signs_other": f32([-0.0, 0.0, -1, 1, inf, -inf, -0.0, 0.0, -1e-30, -3e38]),
    "factors": f32([0.0, 0.0, 0.0, 0.0, 0.0, 1, -2, 0.5, -0.0, nan, 3]),
    "logs": f32([0.0, nan, inf, -1, 2, 0.0, 3, 1e-30, 0.0, 2, nan]),
    "few": f32([1.0, nan, -0.5, inf, 2.5, -inf, nan, 0.0]),
    "few_other": f32([nan, nan, 0.5, 1.0, -inf, -inf, 2.0, -0.0]),
    "near": f32([0.0, 1.0, -0.5, 100.0, -inf, inf]),
    "near_other": f32([0.0, 1.5, 30.0, -100.0, -inf, 2.0]),
    "zeros_and": f32([0.0, -0.0, 2.0, -3.0, nan, inf]),
    "six": f32([0.5, 1.5, -2.0, 3.0, 4.0, 5.0]),
    "m23": normal(2, 3), "n23": normal(2, 3), "m34": normal(3, 4), "n34": normal(3, 4), "m44": normal(4, 4),
    "v2": normal(2), "v3": normal(3), "w3": normal(3), "v4": normal(4),
    "b234": normal(5, 2, 3), "b342": normal(5, 3, 4), "m24": normal(2, 4), "b524": normal(5, 2, 4),
    "order": distinct(3, 5), "cube": normal(3, 6, 6), "image": normal(2, 3, 4, 4), "row": normal(2, 3, 8),
    "shuffled": normal(2, 12, 4, 5), "voxels": normal(1, 2, 3, 2, 3), "columns": normal(1, 12, 49), "scalar": f32(1.5),
    "w456": normal(4, 3, 5), "m25": normal(2, 5), "nans": f32([[1.0, nan, 2.5], [nan, -3.0, 0.5]]),
    "targets": f32([1, -1, 1, -1, 1, 1, -1, 1, -1, 1, 1, -1, 1, 1, -1]), "signs23": f32([[1, -1, 1], [-1, 1, -1]]),
    "unit23": f32([[0.0, 1.0, 0.25], [0.75, 1e-3, 0.999]]), "hits23": f32([[0, 1, 1], [0, 1, 0]]),
    "positive33": normal(3, 3) + 3 * torch.eye(3), "negative33": torch.diag(f32([-2.0, 3.0, 4.0])),
    "singular33": torch.diag(f32([0.0, 3.0, 4.0])), "flags": torch.tensor([[True, False, True], [False, True, True]]),
    "i64": integers(-3, 4, 6), "places": torch.tensor([4, 0, 2]), "lines": torch.tensor([[2, 0], [1, 1], [0, 2]]),
    "counts": torch.tensor([0, 3, -2, 10, 1, -1]), "classes": torch.tensor([1, 3, 0, 2, 3]), "hidden": normal(5, 4),
    "zero": f32([0.0]), "four": torch.tensor([1.0, 2.0, 3.0, 4.0]), "bytes": f32([0.0, 1.0, 2.9, 255.0]),
    "wide": f32([-2.9, 0.0, 3.7, 1000.5]), "threes": normal(2, 3, 3), "m64": normal(6, 4),
}

records, stored = [], dict(POOL)


def case(name, fn=None, scale=0.0, writes=False, signs=False, **inputs):
    """torch's `name` of the inputs in their order, or fn(inputs...)."""
    if fn is None:
        fn = getattr(torch, name, None) or getattr(F, name, None) or (lambda x, *rest: getattr(x, name)(*rest))
    index = sum(record["name"] == name for record in records)
    native = [POOL[key].clone() for key in inputs.values()]
    exact = [x.double() if x.is_floating_point() else x.clone() for x in native]
    real, precise = as_list(fn(*native)), as_list(fn(*exact))
    record = {"name": name, "inputs": inputs}
    if any(not isinstance(y, torch.Tensor) for y in real):
        assert len(real) == 1
        record["value"] = real[0] if isinstance(real[0], (bool, int, float)) else dtype_name(real[0])
    else:
        record["outputs"] = [dtype_name(y.dtype) for y in real]
        for i, (y, z) in enumerate(zip(precise, real)):
            stored[f"{name}.{index}/{i}"] = (y.double() if z.is_floating_point() else z).clone().contiguous()
    if writes:
        assert real[0].data_ptr() == native[0].data_ptr()
        record["writes"] = True
    if signs:
        record["signs"] = True
    if scale:
        record["scale"] = scale
    records.append(record)


def each(names, *arguments, **options):
    for name in names.split():
        case(name, *arguments, **options)


def functions():
    each("absolute negative positive", x="line")
    case("sgn", x="finite")
    each("acos arccos asin arcsin arctanh atanh", x="unit")
    each("acosh arccosh", x="above_one")
    each("atan arctan", x="huge")
    each("cosh sinh", x="exponents")
    each("deg2rad rad2deg exp2", x="line")
    case("exp2", x="i64")
    each("fix frac signbit isneginf isposinf", x="line")
    case("signbit", x="signs")
    case("signbit", x="i64")
    case("float_power", lambda x: torch.float_power(x, 2), x="finite")
    case("logit", x="probability", scale=1.0)
    each("hardsigmoid hardtanh relu6 softsign", x="line")
    case("tanhshrink", x="finite", scale=1.0)
    case("softshrink", lambda x: F.softshrink(x, 0.5), x="line")
    case("hardshrink", lambda x: F.hardshrink(x, 0.5), x="line")
    case("threshold", lambda x: F.threshold(x, 0.1, 20), x="line")
    case("logsigmoid", x="exponents")
    case("celu", lambda x: F.celu(x, 2.0), x="line")
    case("softmin", lambda x: F.softmin(x, 1), x="m23")
    each("clip", lambda x: torch.clip(x, -1, 1), x="line")
    case("clip_", lambda x: x.clip_(-1, 1), x="line", writes=True)
    each("elu_ leaky_relu_ selu_", x="line", writes=True)

    each("arctan2", x="huge", y="huge_other")
    case("copysign", signs=True, x="signs", y="signs_other")
    each("divide true_divide multiply subtract", x="finite", y="finite")
    each("fmax fmin", x="few", y="few_other")
    each("greater greater_equal less less_equal not_equal", x="few", y="few_other")
    case("heaviside", x="zeros_and", y="six")
    case("hypot", x="huge", y="huge_other")
    case("ldexp", x="six", y="near")
    case("ldexp", x="six", y="counts")
    case("logaddexp", x="near", y="near_other")
    case("xlogy", x="factors", y="logs")

    case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 4), x="row", scale=2.0)
    case("addbmm", x="m24", a="b234", b="b342", scale=4.0)
    case("addmv", x="v2", a="m23", y="v3", scale=4.0)
    case("addr", x="m34", y="v3", z="v4", scale=4.0)
    case("baddbmm", x="b524", a="b234", b="b342", scale=4.0)
    case("bilinear", lambda x, w, y: F.bilinear(x, y, w), x="m23", w="w456", y="m25", scale=4.0)
    case("chain_matmul", lambda a, b, x: torch.linalg.multi_dot((a, b, x)), a="m23", b="m34", x="m44", scale=8.0)
    case("inner", x="m34", y="n34", scale=4.0)
    case("ger", y="v3", z="v4")
    case("mm", x="m23", y="m34", scale=4.0)
    case("mv", x="m23", y="v3", scale=4.0)
    case("vdot", y="v3", z="w3", scale=4.0)

    case("adjoint", x="m23")
    case("aminmax", x="m23")
    case("argwhere", x="line")
    each("as_tensor asarray", lambda: torch.tensor([1.0, 2, 3, 4]))
    case("atleast_1d", x="scalar")
    case("atleast_1d", x="v3")
    case("broadcast_to", lambda x: torch.broadcast_to(x, (4, 2, 3)), x="m23")
    case("column_stack", lambda y, z: torch.column_stack((y, z)), y="v3", z="w3")
    each("concat concatenate row_stack vstack", lambda x, y: torch.cat((x, y)), x="m23", y="n23")
    case("hstack", lambda x, y: torch.hstack((x, y)), x="m23", y="n23")
    case("dstack", lambda x, y: torch.dstack((x, y)), x="threes", y="threes")
    case("diag", y="v3")
    case("diff", x="m34", scale=4.0)
    case("dist", x="m23", y="n23", scale=4.0)
    case("dsplit", lambda x: torch.dsplit(x, 3), x="cube")
    case("hsplit", lambda x: torch.hsplit(x, 3), x="cube")
    case("vsplit", lambda x: torch.vsplit(x, 3), x="cube")
    case("equal", x="m23", y="m23")
    case("equal", x="m23", y="n23")
    case("equal", x="m23", y="v3")
    case("fliplr", x="m23")
    case("flipud", x="m23")
    case("is_floating_point", x="m23")
    case("is_floating_point", x="i64")
    case("is_grad_enabled", lambda: torch.is_grad_enabled())
    case("is_nonzero", x="scalar")
    case("is_nonzero", x="zero")
    case("isin", x="i64", y="places")
    case("kthvalue", lambda x: torch.kthvalue(x, 3), x="order")
    case("logspace", lambda: torch.logspace(0, 2, 5))
    each("moveaxis swapaxes swapdims", lambda x: torch.transpose(x, 0, 1), x="m23")
    case("msort", x="order")
    case("nanmean", x="nans", scale=4.0)
    case("nansum", x="nans", scale=4.0)
    case("numel", x="m23")
    case("pairwise_distance", x="m23", y="n23", scale=4.0)
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), x="shuffled")
    case("promote_types", lambda: torch.promote_types(torch.float16, torch.float32))
    case("range", lambda: torch.range(0, 9).long())
    case("ravel", x="m23")
    case("rot90", x="m23")
    case("std_mean", x="m23", scale=2.0)
    case("var_mean", x="m23", scale=2.0)
    case("take", x="m23", n="places")
    case("take_along_dim", lambda x, n: torch.take_along_dim(x, n, 1), x="order", n="lines")
    case("tensor", lambda: torch.tensor([1, 2, 3]))
    case("tensor_split", lambda x: torch.tensor_split(x, (1,)), x="order")
    case("tile", lambda x: torch.tile(x, (2, 2)), x="m23")
    case("trace", x="m44", scale=4.0)
    each("tril_indices", lambda: torch.tril_indices(3, 3))
    each("triu_indices", lambda: torch.triu_indices(3, 3))
    case("unflatten", lambda x: torch.unflatten(x, 0, (2, 3)), x="m64")

    case("det", x="positive33", scale=64.0)
    case("inverse", x="positive33", scale=4.0)
    case("pinverse", x="m23", scale=4.0)
    case("slogdet", x="positive33", scale=4.0)
    each("logdet", x="positive33", scale=4.0)
    each("logdet", x="negative33")
    each("logdet", x="singular33")
    # A singular vector may be turned: the values, and what U diag(S) V^T gives, which is the input.
    case("svd", lambda x: (torch.svd(x).S, x), x="m34", scale=4.0)

    case("margin_ranking_loss", lambda x, y, z: F.margin_ranking_loss(x, y, z, 1.0), x="m23", y="n23", z="signs23", scale=4.0)
    case("soft_margin_loss", x="finite", y="targets", scale=4.0)
    each("upsample upsample_nearest", lambda x: F.interpolate(x, (8, 8)), x="image")
    case("upsample_bilinear", lambda x: F.interpolate(x, (8, 8), mode="bilinear", align_corners=True), x="image", scale=4.0)

    case("bool", lambda x: x.bool(), x="line")
    case("byte", lambda x: x.byte(), x="bytes")
    each("double type", lambda x: x.double(), x="line")
    case("float", lambda x: x.float(), x="i64")
    each("int short", lambda x: x.int(), x="wide")
    case("long", lambda x: x.long(), x="wide")
    case("element_size", x="m23")
    case("element_size", x="i64")
    case("is_signed", x="m23")
    case("is_signed", x="flags")
    case("ndimension", x="m23")
    case("nelement", x="m23")
    case("new_tensor", lambda x: x.new_tensor([1, 2, 3]), x="m23")
    case("masked_scatter_", lambda x, mask, y: x.masked_scatter_(mask, y), x="m23", mask="flags", y="v4", writes=True)
    case("put_", lambda x, n, y: x.put_(n, y), x="m23", n="places", y="v3", writes=True)
    case("sum_to_size", lambda x: x.sum_to_size(2, 1), x="m23", scale=4.0)
    case("tolist", lambda x: torch.tensor(x.flatten().tolist(), dtype=torch.float64), x="m23")


def modules():
    nn = torch.nn

    def module(name, made, scale=0.0, **inputs):
        case(name, made, scale=scale, **inputs)

    module("AdaptiveAvgPool1d", nn.AdaptiveAvgPool1d(4), x="row", scale=2.0)
    module("BCELoss", nn.BCELoss(), x="unit23", y="hits23", scale=4.0)
    case("Bilinear", lambda x, w, y: F.bilinear(x, y, w), x="m23", w="w456", y="m25", scale=4.0)
    module("CELU", nn.CELU(2.0), x="line")
    module("CircularPad1d", nn.CircularPad1d(1), x="row")
    module("CircularPad2d", nn.CircularPad2d(1), x="image")
    module("ConstantPad1d", nn.ConstantPad1d(1, 0.5), x="row")
    module("ConstantPad2d", nn.ConstantPad2d(1, 0.5), x="image")
    module("ConstantPad3d", nn.ConstantPad3d(1, 0.5), x="voxels")
    module("CosineSimilarity", nn.CosineSimilarity(), x="m23", y="n23", scale=2.0)
    module("Fold", nn.Fold(8, 2), x="columns", scale=8.0)
    module("Hardshrink", nn.Hardshrink(), x="line")
    module("Hardsigmoid", nn.Hardsigmoid(), x="line")
    module("Hardtanh", nn.Hardtanh(), x="line")
    module("InstanceNorm3d", nn.InstanceNorm3d(2), x="voxels", scale=4.0)
    case("LinearCrossEntropyLoss", lambda x, w, n: F.cross_entropy(x @ w.T, n), x="hidden", w="m44", n="classes", scale=8.0)
    module("LogSigmoid", nn.LogSigmoid(), x="exponents")
    module("MarginRankingLoss", nn.MarginRankingLoss(1.0), x="m23", y="n23", z="signs23", scale=4.0)
    module("PairwiseDistance", nn.PairwiseDistance(), x="m23", y="n23", scale=4.0)
    module("PixelShuffle", nn.PixelShuffle(2), x="shuffled")
    module("ReLU6", nn.ReLU6(), x="line")
    module("ReflectionPad1d", nn.ReflectionPad1d(1), x="row")
    module("ReflectionPad2d", nn.ReflectionPad2d(1), x="image")
    module("ReplicationPad1d", nn.ReplicationPad1d(1), x="row")
    module("ReplicationPad2d", nn.ReplicationPad2d(1), x="image")
    module("SoftMarginLoss", nn.SoftMarginLoss(), x="finite", y="targets", scale=4.0)
    module("Softmax2d", nn.Softmax2d(), x="image")
    module("Softmin", nn.Softmin(1), x="m23")
    module("Softshrink", nn.Softshrink(), x="line")
    module("Softsign", nn.Softsign(), x="line")
    module("Tanhshrink", nn.Tanhshrink(), x="finite", scale=1.0)
    module("Threshold", nn.Threshold(0.1, 20), x="line")
    module("Unflatten", nn.Unflatten(0, (2, 3)), x="m64")
    module("Unfold", nn.Unfold(2), x="image")
    module("Upsample", nn.Upsample((8, 8)), x="image")
    module("UpsamplingBilinear2d", nn.UpsamplingBilinear2d((8, 8)), x="image", scale=4.0)
    module("UpsamplingNearest2d", nn.UpsamplingNearest2d((8, 8)), x="image")
    module("ZeroPad1d", nn.ZeroPad1d(1), x="row")
    module("ZeroPad2d", nn.ZeroPad2d(1), x="image")
    module("ZeroPad3d", nn.ZeroPad3d(1), x="voxels")


def write_all():
    functions()
    modules()
    used = {key for record in records for key in record["inputs"].values()}
    save_tensors("counterparts.safetensors", {key: x for key, x in stored.items() if "/" in key or key in used})
    write_lines("counterparts.json", records)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
