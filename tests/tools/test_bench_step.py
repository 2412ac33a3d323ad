"""`tools.bench step` on a CPU: what it reports and the trace that --profile leaves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from parallel.mesh import Mesh
from tools import bench_step

TINY = """model: {vocab_size: 256, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,
  head_dim: 64, intermediate_size: 256, first_k_dense_replace: 1, num_experts: 4, num_experts_per_tok: 2,
  moe_intermediate_size: 128, n_group: 2, topk_group: 1, num_shared_experts: 1, max_position_embeddings: 64}
data: {seq_len: 64, vocab_size: 256}
"""


def test_a_step_by_phase_its_share_of_the_roofline_and_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_step.torch.cuda, "is_available", lambda: False)
    (tmp_path / "tiny.yaml").write_text(TINY)
    out, folder = tmp_path / "step.json", tmp_path / "traces"
    size = ["--config", str(tmp_path / "tiny.yaml"), "--batch", "1", "--seq", "32", "--steps", "1", "--chunk", "128"]
    bench_step.main([*size, "--recipes", "block", "bf16", "--profile", str(folder), "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["recipe"] for row in rows] == ["block", "bf16"]
    for row in rows:
        assert all(row[phase] > 0 for phase in bench_step.PHASES)
        assert sum(row[phase] for phase in bench_step.PHASES) == pytest.approx(row["ms"], rel=1e-3)
        assert row["roofline"] is None and row["peak_gib"] is None, "no GPU: neither a roofline nor an allocator"
        trace = json.loads(gzip.open(folder / f"step-{row['recipe']}-solo-rank0.json.gz").read())
        assert any(event.get("name") == "aten::mm" for event in trace["traceEvents"])
    bench_step.main([*size, "--recipes", "block", "block+kept", "--out", str(out)])
    plain, kept = json.loads(out.read_text())
    assert kept["last_loss"] == plain["last_loss"] == rows[0]["last_loss"], "kept transposes change no bit"
    header, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "roofline" in header and len(lines) >= len(rows)
    printed = [line.partition("   solo ")[0].split()[-2:] for line in lines if "   solo " in line]
    assert printed == [["-", "-"]] * len(printed) and len(printed) >= 2


def test_phases_of_several_replayed_micro_batches_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch counts from its own begin; a clock that ticks at every look."""
    ticks = iter(range(1000))
    stepper = object.__new__(bench_step.Stepper)
    stepper.parts, stepper.weights, stepper.device = 4, [], torch.device("cpu")
    stepper.mesh, stepper.reducer, stepper.optimizer = Mesh.solo(), MagicMock(), MagicMock()
    stepper.reducer.norm.return_value = torch.tensor(1.0)
    stepper.graphed = MagicMock(return_value=MagicMock(total=torch.tensor(1.0)))
    stepper.tokens = stepper.labels = stepper.num_valid = None
    monkeypatch.setattr(stepper, "_now", lambda: float(next(ticks)), raising=False)
    _, times = stepper()
    phases = bench_step.split(times)
    assert len(phases) == len(bench_step.GRAPHED) and all(ms >= 0 for ms in phases)
    assert sum(phases) == 1e3 * (times[-1] - times[1])


def test_forward_and_backward_of_a_graph_are_one_number() -> None:
    """Four micro-batches whose replays take 200 ms each, then 30 ms and 70 ms; seconds on a CPU."""
    assert bench_step.split([[], 1.0, 1.8, 1.83, 1.9]) == pytest.approx([800, 30, 70])
    forward = [(1.0, 1.1), (1.4, 1.5)]
    assert bench_step.split([forward, 1.0, 1.8, 1.83, 1.9]) == pytest.approx([200, 600, 30, 70])
