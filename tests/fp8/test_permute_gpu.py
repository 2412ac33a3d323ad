"""Index building and row movement against the references, bitwise."""

import pytest
import torch

from fp8 import index_kernels
from fp8 import permute as permute_module
from fp8 import permute_kernels as kernels
from fp8 import permute_turn_kernels as turn_kernels
from fp8.grouped_gemm import padded_rows
from fp8.permute import Permutation, build_permutation_ref, gather_rows_ref, sum_rows_ref
from fp8.quantize import quantize_ref, requantize_t_ref, retile_t_ref
from fp8.quantized import Quantized
from tests.fp8.kernel_checks import DEVICE, INTERPRETED, ROW, marks, randn, same_bytes

pytestmark = marks
CASES = [(1, 1, 1, 128), (150, 4, 37, 272)]
CASES += [] if INTERPRETED else [(4096, 8, 256, 2048), (1000, 6, 64, 1536), (3, 8, 256, 2048), (16384, 8, 256, 256)]
TURNED = [(1, 1, 1, 128), (20, 2, 3, 256)] if INTERPRETED else [case for case in CASES if case[3] % 128 == 0]


def chosen(tokens: int, k: int, experts: int, holes: bool) -> torch.Tensor:
    """Distinct expert ids of each token, unevenly spread, one expert without tokens; with `holes` some are -1."""
    score = torch.rand(tokens, experts, device=DEVICE) * torch.rand(experts, device=DEVICE)
    score[:, experts // 2] = -1 if experts > k else score[:, experts // 2]
    ids = score.topk(k, dim=1).indices
    return ids.masked_fill(torch.rand(ids.shape, device=DEVICE) < 0.2, -1) if holes else ids


def built(ids: torch.Tensor, experts: int) -> Permutation:
    return Permutation(*index_kernels.place(ids, *index_kernels.count(ids, experts), padded_rows(ids.numel(), experts)))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("tokens, k, experts, cols", CASES)
def test_indices(tokens: int, k: int, experts: int, cols: int, holes: bool) -> None:
    ids = chosen(tokens, k, experts, holes)
    got, want = built(ids, experts), build_permutation_ref(ids, experts, padded_rows(ids.numel(), experts))
    assert torch.equal(got.row_Tk, want.row_Tk) and torch.equal(got.slot_R, want.slot_R)
    for name in ("counts_E", "starts_E", "ends_E", "block_expert_B", "order_E"):
        assert torch.equal(getattr(got.groups, name), getattr(want.groups, name)), name


def test_indices_of_no_slot() -> None:
    """What a rank has whose experts nobody chose."""
    ids = torch.empty(0, 4, dtype=torch.int64, device=DEVICE)
    got, want = built(ids, 37), build_permutation_ref(ids, 37, padded_rows(0, 37))
    assert torch.equal(got.slot_R, want.slot_R) and got.row_Tk.shape == (0, 4)
    for name in ("counts_E", "starts_E", "ends_E", "block_expert_B", "order_E"):
        assert torch.equal(getattr(got.groups, name), getattr(want.groups, name)), name


@pytest.mark.parametrize("form", ["e4m3", "bf16"])
@pytest.mark.parametrize("tokens, k, experts, cols", CASES)
def test_rows_go_and_come_back(tokens: int, k: int, experts: int, cols: int, form: str) -> None:
    perm = built(chosen(tokens, k, experts, holes=True), experts)
    x = randn(tokens, cols)
    x = quantize_ref(x, ROW) if form == "e4m3" else Quantized.unscaled(x)
    got = kernels.scatter_rows(x, perm.row_Tk, perm.slot_R, perm.groups.block_expert_B)
    want = gather_rows_ref(x, torch.where(perm.slot_R >= 0, perm.slot_R // k, perm.slot_R))
    end = int(perm.groups.ends_E[-1])
    if form == "e4m3":
        assert same_bytes(got, want, end)
    else:
        assert torch.equal(got.data[:end], want.data[:end])
    y = randn(perm.groups.max_rows, cols)
    y[end:] = float("nan")  # rows past the last group must not be read
    assert torch.equal(kernels.sum_rows(y, perm.row_Tk), sum_rows_ref(y, perm.row_Tk))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("tokens, k, experts, cols", TURNED)
def test_gathered_and_turned_in_one_pass(tokens: int, k: int, experts: int, cols: int, holes: bool) -> None:
    perm = built(chosen(tokens, k, experts, holes), experts)
    wide = torch.exp2(4 * torch.randn(tokens, 1, device=DEVICE))  # tokens of unlike magnitude, so that re-tiling has to round
    x = quantize_ref((randn(tokens, cols, dtype=torch.float32) * wide).bfloat16(), ROW)
    assert turn_kernels.fits(x)
    live, end = perm.groups.block_expert_B, int(perm.groups.ends_E[-1])
    rows = gather_rows_ref(x, torch.where(perm.slot_R >= 0, perm.slot_R // k, perm.slot_R))
    got_rows, got_columns = turn_kernels.permute_both(x, perm.slot_R, k, live)
    assert same_bytes(got_rows, rows, end)
    want = retile_t_ref(Quantized(rows.data[:end], rows.scale_inv[:end], rows.tile), ROW)
    blocks = end // 128
    assert torch.equal(got_columns.data.view(torch.uint8)[:, :end], want.data.view(torch.uint8))
    assert torch.equal(got_columns.scale_inv[:, :blocks], want.scale_inv)
    square, want = turn_kernels.permute_square(x, perm.slot_R, k, live), requantize_t_ref(rows)
    assert torch.equal(square.data.view(torch.uint8)[:, :end], want.data.view(torch.uint8)[:, :end])
    assert torch.equal(square.scale_inv[:, :blocks], want.scale_inv[:, :blocks])


def test_values_go_and_come_back() -> None:
    perm = built(chosen(150, 4, 37, holes=True), 37)
    w = torch.rand(150, 4, device=DEVICE)
    w_R = kernels.gather_values(w.flatten(), perm.slot_R)
    assert torch.equal(w_R != 0, perm.slot_R >= 0)
    assert torch.equal(kernels.gather_values(w_R, perm.row_Tk), torch.where(perm.row_Tk >= 0, w, 0.0))


@pytest.mark.skipif(INTERPRETED, reason="needs a device to synchronise with")
def test_no_host_synchronisation() -> None:
    ids, x = chosen(512, 8, 64, holes=False), quantize_ref(randn(512, 256), ROW)
    w = torch.rand(512, 8, device=DEVICE)

    def once() -> None:
        perm = permute_module.build_permutation(ids, 64)
        permute_module.permute(x, perm)
        w_R = permute_module.permute_slots(w, perm)
        permute_module.unpermute_slots(w_R, perm)
        permute_module.unpermute_sum(torch.zeros(perm.groups.max_rows, 256, device=DEVICE, dtype=torch.bfloat16), perm)

    once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
