"""`tools.bench memory --per-layer` on a CPU: what one MoE layer keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import bench_memory


def test_fp8_at_stage_2_keeps_45_percent_less_than_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "layer.json"
    bench_memory.main(["--per-layer", "--layers", "2", "--seq-len", "128", "--out", str(out)])
    kept = json.loads(out.read_text())
    assert list(kept) == [f"{recipe}/{stage}" for recipe, stage in bench_memory.PER_LAYER]
    assert kept["block/2"] < 0.55 * kept["bf16/0"]
    by_stage = [kept[f"block/{stage}"] for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    h, f = bench_memory.SMALL.hidden_size, bench_memory.SMALL.moe_intermediate_size
    assert kept["bf16/0"] > 2 * (3 * h + 3 * bench_memory.SMALL.num_experts_per_tok * f), "less than the layer's own inputs"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(kept)].startswith("| bf16 | 0 |") and lines[-1].startswith("| block | 3 |")
