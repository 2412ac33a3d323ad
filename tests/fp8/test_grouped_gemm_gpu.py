"""The Hopper expert GEMMs against float64, with everything they must not read poisoned.

Bounds: the FP8 tensor core aligns 32 products and the running sum to the largest exponent among them and keeps about 13 bits
below it. So a 128-wide block is off by 2^-11 of its sum of magnitudes, plus, where one product dwarfs the others, 33 truncations
of 2^-13 of that product. FP32 promotion adds nothing visible beside that, and the output is rounded once.
"""

import pytest
import torch

from fp8.grouped_gemm import (
    Groups,
    grouped_gemm_nt,
    grouped_gemm_nt_ref,
    grouped_gemm_quantized,
    grouped_wgrad,
    grouped_wgrad_ref,
    make_groups,
    quantizes_output,
)
from fp8.quantize import quantize_ref, quantize_t_ref, requantize_t_ref
from fp8.quantized import Quantized
from fp8.recipe import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]

ROW, BLOCKS = Spec("e4m3", (1, 128), "block"), Spec("e4m3", (128, 128), "block")
NAN_CODE = 0x7F
ODD = [0, 1, 127, 128, 129, 0, 300, 64, 65, 0]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}


def groups_of(counts: list[int], spare_blocks: int = 3) -> Groups:
    """Groups with `spare_blocks` blocks past the last one."""
    rows = sum(-(-c // 128) * 128 for c in counts) + 128 * spare_blocks
    return make_groups(torch.tensor(counts, device="cuda"), rows)


def grouped_rows(groups: Groups, cols: int, positive: bool = False) -> torch.Tensor:
    """Random rows of very different size in each group's real rows, zeros elsewhere: [R, cols] fp32."""
    x = torch.randn(groups.max_rows, cols, device="cuda")
    x = (x.abs() + 0.5 if positive else x) * torch.exp2(torch.randint(-6, 7, (groups.max_rows, 1), device="cuda").float())
    real = torch.zeros(groups.max_rows, 1, device="cuda")
    for start, count in zip(groups.starts_E.tolist(), groups.counts_E.tolist(), strict=True):
        real[start : start + count] = 1
    return x * real


def poison(q: Quantized, end: int, rows_first: bool) -> Quantized:
    """NaN codes and NaN scales past row `end`."""
    data, scale = q.data.view(torch.uint8), q.scale_inv
    if rows_first:
        data[end:] = NAN_CODE
        scale[end:] = float("nan")
    else:
        data[:, end:] = NAN_CODE
        scale[:, end // 128 :] = float("nan")
    return q


def block_peaks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, N]: a bound on the largest product of each 128-wide block, summed over the blocks of [M, K] . [N, K]^T."""
    peak_a, peak_b = (t.abs().unflatten(1, (-1, 128)).amax(2) for t in (a, b))
    return peak_a @ peak_b.t()


def assert_close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, old: torch.Tensor | None, what: str) -> None:
    """Elementwise against the float64 product of [M, K] and [N, K] (plus `old`); NaN fails."""
    exact = a @ b.t() if old is None else a @ b.t() + old
    drift = 2.0**-11 * (a.abs() @ b.abs().t()) + 33 * 2.0**-13 * block_peaks(a, b)
    excess = ((out.double() - exact).abs() / (ROUNDING[out.dtype] * exact.abs() + drift + 1e-30)).nan_to_num(nan=1e30)
    assert excess.numel() == 0 or excess.max() <= 1, f"{what}: {excess.max().item():.3g} times the bound"


def check_nt(
    counts: list[int],
    n: int,
    k: int,
    dtype: torch.dtype,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
) -> None:
    from fp8.grouped_gemm_sm90 import grouped_gemm_nt_sm90

    groups = groups_of(counts)
    end = int(groups.ends_E[-1])
    a_q = poison(quantize_ref(grouped_rows(groups, k) if a is None else a, ROW), end, rows_first=True)
    b_q = quantize_ref(torch.randn(len(counts), n, k, device="cuda") if b is None else b, BLOCKS)
    out = torch.full((groups.max_rows, n), float("nan"), dtype=dtype, device="cuda")
    grouped_gemm_nt_sm90(a_q, b_q, groups, dtype, out=out)
    assert out[end:].isnan().all(), "rows past the last group were written"
    a64, b64 = a_q.dequantize().double(), b_q.dequantize().double()
    for e, (start, stop) in enumerate(zip(groups.starts_E.tolist(), groups.ends_E.tolist(), strict=True)):
        rows = slice(start, stop)
        assert_close(out[rows], a64[rows], b64[e], None, f"expert {e}")
    again = grouped_gemm_nt_sm90(a_q, b_q, groups, dtype)
    assert torch.equal(out[:end], again[:end]), "two runs differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n, k", [(256, 128), (512, 384), (384, 256), (128, 512), (1024, 512), (640, 640)])
def test_nt_odd_groups(n: int, k: int, dtype: torch.dtype):
    check_nt(ODD, n, k, dtype)


@pytest.mark.parametrize("counts", [[1000], [0, 0, 0, 777], [513, 0, 0], [0, 0], [1] * 512, [130] * 64])
def test_nt_group_shapes(counts: list[int]):
    check_nt(counts, 256, 256, torch.bfloat16)


def test_nt_fills_every_multiprocessor_many_times():
    check_nt([700, 0, 1900, 3, 2500, 128, 4000, 999], 2048, 512, torch.bfloat16)
    check_nt([700, 0, 1900, 3, 2500, 128, 4000, 999], 512, 2048, torch.bfloat16)


def test_nt_long_sums_of_one_sign():
    """Left in the tensor core's accumulator, 16384 positive terms lose percents; promoted every 128 they must not."""
    groups = groups_of([200])
    a = grouped_rows(groups, 16384, positive=True)
    check_nt([200], 256, 16384, torch.float32, a, torch.rand(1, 256, 16384, device="cuda") + 0.5)


def test_nt_long_sums_that_cancel():
    groups = groups_of([200])
    a = grouped_rows(groups, 16384, positive=True)
    b = torch.rand(1, 256, 16384, device="cuda") + 0.5
    b[..., 8192:] *= -1
    check_nt([200], 256, 16384, torch.float32, a, b)


def check_wgrad(counts: list[int], n: int, k: int, dtype: torch.dtype, accumulate: bool):
    from fp8.grouped_gemm_sm90 import grouped_wgrad_sm90

    groups = groups_of(counts)
    end = int(groups.ends_E[-1])
    dy_t = poison(quantize_t_ref(grouped_rows(groups, n), ROW), end, rows_first=False)
    x_t = poison(requantize_t_ref(quantize_ref(grouped_rows(groups, k), ROW)), end, rows_first=False)
    old = torch.randn(len(counts), n, k, device="cuda").to(dtype)
    old[:, 0, 0] = -0.0
    out = old.clone() if accumulate else torch.full_like(old, float("nan"))
    grouped_wgrad_sm90(dy_t, x_t, groups, out, accumulate)
    again = old.clone() if accumulate else torch.full_like(old, float("nan"))
    grouped_wgrad_sm90(dy_t, x_t, groups, again, accumulate)
    assert torch.equal(out, again), "two runs differ"
    dy64, x64 = dy_t.dequantize().double(), x_t.dequantize().double()
    for e, (start, stop) in enumerate(zip(groups.starts_E.tolist(), groups.ends_E.tolist(), strict=True)):
        if start == stop:
            expected = old[e] if accumulate else torch.zeros_like(old[e])
            assert torch.equal(out[e].view(torch.int16), expected.view(torch.int16)), f"empty expert {e} was touched"
            continue
        dy, x = dy64[:, start:stop], x64[:, start:stop]
        assert_close(out[e], dy, x, old[e].double() if accumulate else None, f"expert {e}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("n, k", [(128, 256), (256, 128), (384, 640), (512, 512)])
def test_wgrad_odd_groups(n: int, k: int, accumulate: bool, dtype: torch.dtype):
    check_wgrad(ODD, n, k, dtype, accumulate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("counts", [[16384], [0, 0, 0, 777], [513, 0, 0], [0, 0], [1] * 512, [130] * 64])
def test_wgrad_group_shapes(counts: list[int], accumulate: bool, dtype: torch.dtype):
    check_wgrad(counts, 128, 256, dtype, accumulate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wgrad_fills_every_multiprocessor_many_times(dtype: torch.dtype):
    check_wgrad([700, 0, 1900, 3, 2500, 128, 400, 999], 1024, 2048, dtype, accumulate=True)


def test_wgrad_deals_out_every_tile_of_uneven_groups():
    check_wgrad([4000, 1, 0, 2500, 128, 64, 9000, 300, 0, 777], 512, 512, torch.bfloat16, accumulate=False)


def test_public_functions_take_the_kernels():
    """FP8 operands on this device reach the kernels: their result differs from the reference by FP8 accumulation only."""
    groups = groups_of(ODD)
    a = quantize_ref(grouped_rows(groups, 256), ROW)
    b = quantize_ref(torch.randn(len(ODD), 384, 256, device="cuda"), BLOCKS)
    end = int(groups.ends_E[-1])
    got = grouped_gemm_nt(a, b, groups, torch.float32)[:end]
    want = grouped_gemm_nt_ref(a, b, groups, torch.float32)[:end]
    assert 0 < (got - want).norm() / want.norm() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_operands_keep_the_same_promises(dtype: torch.dtype):
    """F.grouped_mm behind the same functions: rows past the end unread, empty experts zero or untouched."""
    groups = groups_of(ODD)
    end = int(groups.ends_E[-1])
    x, dy = (grouped_rows(groups, cols).bfloat16() for cols in (256, 128))
    x[end:], dy[end:] = float("nan"), float("nan")
    w = torch.randn(len(ODD), 128, 256, device="cuda", dtype=torch.bfloat16)
    y = grouped_gemm_nt(Quantized.unscaled(x), Quantized.unscaled(w), groups)
    want = grouped_gemm_nt_ref(Quantized.unscaled(x), Quantized.unscaled(w), groups, torch.float32)
    assert (y[:end].float() - want[:end]).norm() < 4e-3 * want[:end].norm()
    dy_t, x_t = (Quantized.unscaled(t.t().contiguous()) for t in (dy, x))
    exact = torch.zeros(len(ODD), 128, 256, device="cuda")
    grouped_wgrad_ref(dy_t, x_t, groups, exact, accumulate=False)
    for accumulate in (False, True):
        out = torch.full_like(exact, 3.0).to(dtype)
        grouped_wgrad(dy_t, x_t, groups, out, accumulate)
        want = exact + 3.0 if accumulate else exact
        assert (out.float() - want).norm() < 8e-3 * want.norm()
        empty = torch.tensor(ODD, device="cuda") == 0
        assert torch.equal(out[empty], want[empty].to(dtype))


@pytest.mark.parametrize("n, k", [(256, 128), (1024, 2048), (512, 384)])
@pytest.mark.parametrize("counts", [ODD, [0, 0, 5], [3000, 1, 0, 700], [4096] * 3], ids=str)
def test_quantised_output_is_the_bf16_one_quantised(counts: list[int], n: int, k: int):
    """Bitwise, codes and scales, and again in a second launch."""
    groups = groups_of(counts)
    end = int(groups.ends_E[-1])
    a = poison(quantize_ref(grouped_rows(groups, k), ROW), end, rows_first=True)
    b = quantize_ref(torch.randn(len(counts), n, k, device="cuda") * 0.05, BLOCKS)
    assert quantizes_output(a, b)
    got, want = grouped_gemm_quantized(a, b, groups), quantize_ref(grouped_gemm_nt(a, b, groups)[:end], ROW)
    assert torch.equal(got.data.view(torch.uint8)[:end], want.data.view(torch.uint8))
    assert torch.equal(got.scale_inv[:end], want.scale_inv)
    again = grouped_gemm_quantized(a, b, groups)
    assert torch.equal(again.data.view(torch.uint8)[:end], got.data.view(torch.uint8)[:end])
