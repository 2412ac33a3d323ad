"""`tools.bench rounding`: what each rounding costs at one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8.recipe import Recipe
from fp8.weight import weights
from model.loss import count_valid
from model.transformer import Transformer
from tests.model import tiny
from tests.tools.test_bench_operands import small_run
from tools.bench_rounding import Errors, differing, gradients, losses_of, main
from tools.rounding_settings import (
    BF16,
    BLOCK,
    CLASSES,
    WEIGHTS,
    Setting,
    class_of,
    forward_settings,
    gradient_settings,
    new_model,
    rounded_as,
    roundings,
    take,
)
from training.errors import UserError


def under(like: Transformer, setting: Setting) -> Transformer:
    model = new_model(like)
    take(model, setting, {name: weight.data for name, weight in weights(like)})
    return model


def test_every_gemm_has_a_class_and_follows_its_setting() -> None:
    like = tiny.build(Recipe.fp32())
    kinds = {name: class_of(name) for name, _ in weights(like)}
    assert set(kinds.values()) == {*CLASSES, "embedding", "router", "norms", "mtp"}
    assert kinds["layers.1.block.experts.down"] == "experts down" and kinds["layers.0.block.mlp.down"] == "dense, shared"
    model = under(like, Setting("", BLOCK, ("experts down",)))
    in_fp8 = {name for name, weight in weights(model) if weight.spec.is_fp8}
    assert in_fp8 == {name for name, kind in kinds.items() if kind == "experts down"}
    in_fp8 = {name for name, weight in weights(under(like, Setting("", BLOCK))) if weight.spec.is_fp8}
    assert in_fp8 == {name for name, kind in kinds.items() if kind in (*CLASSES, "mtp")}
    assert len({s.name for s in forward_settings()}) == len(forward_settings()) and len(gradient_settings()) == 18


def test_the_loss_is_that_of_a_model_built_under_the_recipe() -> None:
    like, batch = tiny.build(Recipe.fp32()), tiny.batch(4, 128)
    for recipe in (Recipe.bf16(), Recipe.block(), Recipe.mx()):
        losses, choices = losses_of(under(like, Setting("", recipe)), Setting("", recipe), [batch], None)
        with torch.no_grad():
            want = tiny.build(recipe).eval()(*batch, count_valid(*batch))
        assert losses.mean().item() == pytest.approx((want.ce_sum / want.num_ce).item(), rel=1e-6)
        turned, same = losses_of(under(like, Setting("", recipe)), Setting("", recipe, reverse=True), [batch], None)
        torch.testing.assert_close(turned, losses, rtol=1e-5, atol=1e-5)
        assert differing(same, choices) < 0.01


def test_the_reference_can_choose_the_experts() -> None:
    like, (tokens, labels) = tiny.build(Recipe.fp32()), tiny.batch(4, 128)
    coarse = Setting("", Recipe.tensorwise_current("e5m2"))
    model, plain = under(like, coarse), under(like, Setting("", BF16))
    _, reference = losses_of(plain, Setting("", BF16), [(tokens, labels)], None)
    free, own = losses_of(model, coarse, [(tokens, labels)], reference)
    held, _ = losses_of(model, Setting("", coarse.recipe, same_experts=True), [(tokens, labels)], reference)
    assert 0 < differing(own, reference) < 0.5 and not torch.equal(free, held)
    by_itself, _ = losses_of(plain, Setting("", BF16, same_experts=True), [(tokens, labels)], reference)
    torch.testing.assert_close(by_itself, losses_of(plain, Setting("", BF16), [(tokens, labels)], None)[0])
    free_g = {name: g.clone() for name, g in gradients(plain, tokens, labels).items()}
    with rounded_as(plain, Setting("", BF16, same_experts=True)) as _, pytest.raises(TypeError):
        gradients(plain, tokens, labels)  # which experts?
    with rounded_as(plain, Setting("", BF16)) as choices:
        gradients(plain, tokens, labels)
    with rounded_as(plain, Setting("", BF16, same_experts=True), choices):
        for name, g in gradients(plain, tokens, labels).items():
            torch.testing.assert_close(g, free_g[name], rtol=1e-4, atol=1e-7, msg=name)
    assert not any(router._forward_hooks for router in plain.modules())


def test_swiglu_reads_what_the_setting_says() -> None:
    """Rounded pre-activations move BF16's loss, unrounded ones `inputs alone`; where nothing is rounded both are no change."""
    like, batches = tiny.build(Recipe.fp32()), [tiny.batch(4, 128)]
    found = {}
    for name, recipe in (("bf16", BF16), ("block", BLOCK)):
        model = under(like, Setting("", recipe))
        for swiglu in ("", "rounded", "unrounded"):
            found[name, swiglu] = losses_of(model, Setting("", recipe, swiglu=swiglu), batches, None)[0]
    assert torch.equal(found["bf16", ""], found["bf16", "unrounded"]) and torch.equal(found["block", ""], found["block", "rounded"])
    assert not torch.equal(found["bf16", ""], found["bf16", "rounded"])
    assert not torch.equal(found["block", ""], found["block", "unrounded"])


def test_roundings_are_of_the_same_weights() -> None:
    like = tiny.build(Recipe.fp32())
    master = dict(weights(like))["head"].data
    made = [
        dict(weights(under(like, s)))["head"].data.float()
        for s in (Setting("", BLOCK, ("head",)), *roundings(Setting("", WEIGHTS, many=True), 3))
    ]
    assert made[0].shape == made[1].shape and len(made) == 4
    for i, value in enumerate(made[1:]):
        assert 0.02 < ((value - master).norm() / master.norm()).item() < 0.033
        assert all(not torch.equal(value, other) for other in made[1 + i + 1 :])
    assert roundings(Setting("", BLOCK), 3) == [Setting("", BLOCK)]


def test_what_lasts_is_told_from_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    signal, bias = torch.ones(4000), torch.zeros(4000)
    bias[:1000] = 0.2  # |bias| / |signal| = 0.1, projection 0.05
    draw = lambda size: size * torch.randn(4000, generator=generator)  # noqa: E731
    noisy, biased = Errors(), Errors()
    for i in range(16):
        want = signal + draw(2.0)
        noisy.add({"head": want}, {"head": want + draw(0.3)})
        biased.add({"head": want}, {"head": want + bias + draw(0.3)})
        if i in (0, 15):
            noisy.note("noisy")
            biased.note("biased")
    (first, last), (_, lasts) = noisy.rows, biased.rows
    assert (first["kind"], first["batches"], last["batches"]) == ("head", 1, 16) and "lasting" not in first
    assert first["error"] == pytest.approx(0.3 / 5**0.5, rel=0.05)  # a micro-batch's |g|^2 is 1 + 2^2 times the signal's
    assert last["error"] == pytest.approx(last["if_noise"], rel=0.1) and last["lasting"] < 0.03
    assert lasts["error"] > 1.2 * lasts["if_noise"] and lasts["lasting"] == pytest.approx(0.1, rel=0.15)
    assert last["sampling"] == pytest.approx(2 / 4, rel=0.1) and abs(last["projection"]) < 0.01


def test_a_run_prints_both_tables(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    small_run(tmp_path)
    out = tmp_path / "rounding.json"
    sizes = ["--sequences", "4", "--batch", "2", "--roundings", "2", "--micro-batches", "2", "--micro-batch", "1"]
    main(["--run", str(tmp_path), *sizes, "--out", str(out)])
    text, rows = capsys.readouterr().out, json.loads(out.read_text())
    loss = {row["setting"]: row for row in rows["loss"]}
    assert list(loss) == [s.name for s in forward_settings()] and loss["bf16"]["gap"] == 0
    assert 0 < abs(loss["block"]["gap"]) < 0.01 and loss["weights alone"]["spread"] > 0
    errors = {(row["kind"], row["setting"]): row["error"] for row in rows["gradients"] if row["batches"] == 2}
    for kind in CLASSES:
        assert 0 < 4 * errors[kind, "bf16, same experts"] < errors[kind, "block, same experts"] < 0.3
        assert f"| {kind}, weights alone |" in text and f"| {kind} | block |" in text
    main(["--run", str(tmp_path), *sizes, "--what", "gradients", "--match", "dY,hybrid"])
    assert "dY alone" in (short := capsys.readouterr().out) and "weights alone" not in short and "| embedding | bf16 |" in short


def test_a_name_of_no_setting_is_refused() -> None:
    with pytest.raises(UserError, match="--match: no setting has 'nonsense' in its name; there are bf16; "):
        main(["--run", "none", "--match", "head,nonsense"])
