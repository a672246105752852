"""Products against the formula in float64, for every implementation."""

import pytest
import torch
from torch import Tensor, nn

from helpers import DEVICE, assert_at_most_twice, assert_close_in, randn
from writehead.errors import BackendError, ConfigError, ShapeError
from writehead.ops.linear import Epilogue, Tile, Weight, choose_tile, linear, small_rows
from writehead.ops.norm import DeferredRms, Norm

pytest.importorskip("triton", reason="Triton is not installed")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HALVES = [F16, BF16][: 1 + (DEVICE == "cuda")]  # Triton's interpreter is wrong in bfloat16
OPTIONS = ["", "rms bias relu scale", "bias residual scale", "layer bias gelu residual", "gated"]
OPTIONS += ["layer gelu_tanh", "rms gated silu residual", "layer bias gated gelu scale"]
ACTIVATIONS = {
    "relu": lambda Z: Z.clamp(min=0),
    "gelu": lambda Z: Z * (1 + torch.erf(Z / 2**0.5)) / 2,
    "gelu_tanh": lambda Z: Z / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (Z + 0.044715 * Z**3))),
    "silu": lambda Z: Z / (1 + torch.exp(-Z)),
}


IMPLEMENTATIONS = ["reference", "library", "small_rows"]  # split_depth has fewer options


class Case:
    """A product with some options, in float32 until `to` another dtype."""

    def __init__(self, rows: int, columns: int, depth: int, options: str) -> None:
        self.names = options.split()
        self.X = 0.5 + randn(rows, depth)
        self.W = randn(columns * (1 + ("gated" in self.names)), depth) / depth**0.5
        self.bias = randn(len(self.W)) if "bias" in self.names else None
        self.kind = next((name for name in ("rms", "layer") if name in self.names), None)
        self.gain, self.shift = 1 + 0.3 * randn(depth), randn(depth)
        self.residual = randn(rows, columns) if "residual" in self.names else None
        self.activation = next((name for name in self.names if name in ACTIVATIONS), None)
        self.scale = 0.7 if "scale" in self.names else 1.0

    def to(self, dtype: torch.dtype) -> "Case":
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(dtype))
        return self

    def without_gain(self) -> "Case":
        """Makes folding exact, so that only the product is compared."""
        self.gain.fill_(1.0)
        self.shift.zero_()
        return self

    @property
    def weight(self) -> Weight:
        norm = None
        if self.kind is not None:
            norm = Norm(self.kind, self.gain, self.shift if self.kind == "layer" else None, 0.3)
        return Weight(self.W, self.bias, norm)

    @property
    def epilogue(self) -> dict[str, object]:
        R = None if self.residual is None else self.residual.clone()
        return {"activation": self.activation, "gated": "gated" in self.names, "residual": R}

    def run(self, implementation: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Returns the result of `linear`, with a folded weight if the kernel needs one."""
        named = self.epilogue
        X = self.X.view(*shape, *self.X.shape[-1:]) if shape else self.X
        if shape and self.residual is not None:
            named["residual"] = named["residual"].view(*shape, -1)
        if implementation == "small_rows":
            weight = self.weight.fold(scale=self.scale)
            return linear(X, weight, implementation=implementation, **named)
        return linear(X, self.weight, scale=self.scale, implementation=implementation, **named)

    def exact(self) -> Tensor:
        """Computes the formula in float64."""
        X, W = self.X.double(), self.W.double()
        if self.kind == "layer":
            X = X - X.mean(-1, keepdim=True)
        if self.kind is not None:
            X = X / (X.square().mean(-1, keepdim=True) + 0.3).sqrt() * self.gain.double()
        X = X + self.shift.double() if self.kind == "layer" else X
        Z = self.scale * (X @ W.T) + (0 if self.bias is None else self.bias.double())
        f = Z.shape[1] // 2
        act = ACTIVATIONS.get(self.activation, lambda Z: Z)
        Y = act(Z[:, :f]) * Z[:, f:] if "gated" in self.names else act(Z)
        return Y + (0 if self.residual is None else self.residual.double())


@pytest.mark.parametrize("rows", [1, 3, 18])
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "auto"])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_implementation_equals_the_formula(options, implementation, rows):
    case = Case(rows, 21, 37, options)
    Y = case.run(implementation, (rows // 3, 3) if rows > 1 else (1,))
    assert Y.shape[:-1].numel() == rows
    assert_close_in(F32, Y.flatten(0, -2), case.exact(), ulps=64)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", ["vector", "ahead", "split", "tile"])
def test_every_tile_equals_the_formula_where_nothing_divides_anything(method, options):
    tile = {
        "vector": Tile("vector", 1, 8, 16, 2, 1, ahead=True),
        "ahead": Tile("split", 16, 8, 16, 2, 1, ahead=True),
        "split": Tile("split", 16, 16, 32, 4, 2, prefetch=64),
        "tile": Tile("tile", 16, 32, 32, 4, 3, prefetch=64),
    }[method]
    case = Case(1 if method == "vector" else 19, 21, 76, options)
    folded = case.scale if case.kind == "layer" else 1.0  # the norm's bias needs the scale, too
    epilogue = Epilogue(**case.epilogue, scale=case.scale / folded)
    Y = small_rows(case.X, case.weight.fold(scale=folded), epilogue, tile)
    assert_close_in(F32, Y, case.exact(), ulps=64)


@pytest.mark.parametrize(
    ("rows", "columns", "own"),
    [
        *((2, 1280, 8), (64, 1280, 16), (128, 1024, 16), (128, 1280, 32)),
        *((256, 1280, 64), (1024, 1024, 64), (1024, 1280, 64)),
    ],
)
def test_tiles_are_as_narrow_as_one_wave_of_programs_allows(rows, columns, own):
    X, W = (torch.empty(n, 1024, dtype=torch.bfloat16) for n in (rows, columns))
    tile = choose_tile(X, W)
    assert tile.columns == own
    assert -(-rows // tile.rows) * -(-columns // own) <= (264 if own == 64 else 160)


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("depth", [4, 300, 1500])
@pytest.mark.parametrize("options", ["", "bias relu scale", "bias gelu residual", "deferred"])
def test_split_depth_equals_the_formula(options, depth, rows):
    case = Case(rows, 21, depth, options)
    if options == "deferred":
        X = 3 + randn(rows, 21)
        factors = (X.double().square().mean(1, keepdim=True) + 0.3).rsqrt()
        given, case.X = case.X, case.X.clamp(min=0)
        exact = X + factors * case.exact()
        for name in ("split_depth", "reference"):
            named = {"residual": X.clone(), "deferred": DeferredRms(X, 0.3), "relu_input": True}
            Y = linear(given, case.weight, implementation=name, **named)
            assert_close_in(F32, Y, exact, ulps=64)
    else:
        assert_close_in(F32, case.run("split_depth"), case.exact(), ulps=64)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "options"),
    [
        *((1, 5, depth, "rms") for depth in (1, 16, 1100)),
        (1, 9, 5000, "layer bias residual"),
        (2, 9, 40, "rms gated silu"),
        (16, 9, 1500, "residual"),
        (16, 9, 1024, "layer bias relu"),
        (17, 9, 200, "rms gelu"),
        (5, 2112, 24, "rms relu"),
        (33, 40, 200, "rms"),
        (70, 40, 136, "layer gelu_tanh residual"),
        (40, 24, 64, "layer bias gated silu residual"),
        (40, 9, 37, "rms bias"),  # not aligned for descriptors
    ],
    ids=str,
)
def test_small_rows_errs_at_most_twice_as_much_as_pytorch(rows, columns, depth, options, dtype):
    case = Case(rows, columns, depth, options).to(dtype).without_gain()
    assert_at_most_twice(case.run("small_rows"), case.run("reference"), case.exact())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("implementation", ["small_rows", "library", "auto"])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 128, 256])
@pytest.mark.parametrize(
    ("columns", "depth", "options"),
    [
        *((1280, 1024, "rms"), (3072, 1024, "layer bias"), (5440, 1024, "rms bias gelu_tanh")),
        *((2720, 1024, "rms gated silu"), (1024, 5440, "bias residual")),
        *((32768, 1024, "rms scale"), (999, 1000, "layer bias residual")),
    ],
    ids=str,
)
def test_large_products_on_a_gpu(columns, depth, options, rows, implementation, dtype):
    case = Case(rows, columns, depth, options).to(dtype).without_gain()
    Y, exact = case.run(implementation), case.exact()
    if dtype == F32:
        assert_close_in(F32, Y, exact, ulps=64)
    else:
        assert_at_most_twice(Y, case.run("reference"), exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_may_be_folded_and_the_residual_may_be_the_input(implementation):
    for options in ("rms bias relu residual", "layer bias relu residual scale", "residual"):
        case = Case(4, 37, 37, options)
        case.residual = case.X
        exact, weight = case.exact(), case.weight.fold(scale=case.scale)
        given = {"activation": case.activation, "implementation": implementation}
        assert_close_in(F32, linear(case.X, weight, residual=case.X, **given), exact, ulps=64)
    unbiased = Weight(case.W).fold(zero_bias=True)
    assert_close_in(F32, linear(case.X, unbiased), linear(case.X, Weight(case.W)))


@pytest.mark.parametrize("rows", [1, 5])
def test_layer_norm_of_a_large_mean_cancels(rows):
    case = Case(rows, 9, 200, "layer")
    case.X += 30.0
    case.to(F16).without_gain()
    assert_at_most_twice(case.run("small_rows"), case.run("reference"), case.exact())


def test_gradients_and_autocast_are_those_of_the_modules():
    P, norm = nn.Linear(37, 21, device=DEVICE), nn.LayerNorm(37, device=DEVICE)
    X = randn(2, 3, 37).requires_grad_(True)
    inputs = [X, *P.parameters(), *norm.parameters()]
    weight = Weight(P.weight, P.bias, Norm.of(norm))
    for enabled in (False, True):
        with torch.autocast(DEVICE, BF16, enabled=enabled):
            ours = linear(X, weight, activation="relu", residual=X[..., :21])
            plain = X[..., :21] + torch.relu(P(norm(X)))
        assert ours.dtype == plain.dtype
        for G, expected in zip(
            torch.autograd.grad(ours.sin().sum(), inputs),
            torch.autograd.grad(plain.sin().sum(), inputs),
            strict=True,
        ):
            assert_close_in(BF16 if enabled else F32, G, expected)
    with torch.no_grad(), torch.autocast(DEVICE, BF16):
        assert linear(X, weight).dtype == P(norm(X)).dtype


def test_auto_never_raises_and_names_do():
    case = Case(4, 21, 37, "rms")
    for rows, dtype in ((1100, F32), (4, torch.float64), (0, F32)):
        X, weight = randn(rows, 37, dtype=dtype), Weight(case.W.to(dtype))
        assert linear(X, weight).shape == (rows, 21)
        if rows != 4:
            with pytest.raises(BackendError, match="rows"):
                linear(X, weight, implementation="small_rows")
    for weight in (case.weight, Weight(case.W, norm=Norm("layer", None, None, 0.3))):
        with pytest.raises(BackendError, match="fold"):
            linear(case.X, weight, implementation="small_rows")
    assert linear(case.X.to("meta"), Weight(case.W.to("meta")), gated=False).shape == (4, 21)
    assert linear(case.X[:0], Weight(case.W[:20]), gated=True).shape == (0, 10)
    for rows, weight in ((1, Weight(case.W)), (4, case.weight), (4, Weight(case.W[:, 1:]))):
        X = randn(rows, weight.W.shape[1])
        with pytest.raises(BackendError, match=r"rows|norms|aligned"):
            linear(X, weight, implementation="split_depth")
    with pytest.raises(BackendError, match="gradient"):
        linear(case.X.requires_grad_(True), case.weight, implementation="library")
    with pytest.raises(ConfigError, match="library"):
        linear(case.X, case.weight, implementation="libary")
    with pytest.raises(ShapeError, match="depth 36"):
        linear(case.X[:, :36], case.weight)
    with pytest.raises(ShapeError, match="residual"):
        linear(case.X, case.weight, residual=case.X)
