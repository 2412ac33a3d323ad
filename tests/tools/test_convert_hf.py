"""Hugging Face folders in and out: bitwise round trips, the published format, one clear message for each bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8.optimizer import AdamW
from fp8.quantized import expand_scales
from fp8.recipe import Recipe
from fp8.weight import weights
from model.huggingface import parts
from model.router import routers
from model.transformer import Transformer, initial_values
from parallel.mesh import Mesh
from tests.model.tiny import CONFIG
from tools import convert_hf
from tools.hf_config import export_config, import_config
from tools.hf_files import TensorWriter, read_json
from training.checkpoint import Checkpointer, load_masters
from training.config import Config, Fp8Config, RunConfig
from training.corpus import DataConfig
from training.errors import UserError, exit_status
from training.streaming import ShardReader
from training.tokenizer import train_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "ling_tiny"
SCALE = "_scale_inv"


def read_all(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, as an engine loads them: through the index."""
    placed = read_json(folder / "model.safetensors.index.json")["weight_map"]
    return {k: v for shard in sorted(set(placed.values())) for k, v in load_file(folder / shard).items()}


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def call(*arguments: object) -> int:
    return exit_status(lambda: convert_hf.main([str(a) for a in arguments]))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the golden checkpoint, to be spoilt."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, folder / name)
    return folder


@pytest.fixture
def fp8_source(source: Path) -> Path:
    """The same in block FP8 with scales that are no powers of two, as published converters write it; two shards."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    config = import_config(read_json(source / "config.json"), "golden")
    for name in [p.hf_name for p in parts(config) if p.fp8]:
        value = tensors[name].float()
        blocks = [-(-n // 128) for n in value.shape]
        scale = value.abs().amax() / 448 * (0.5 + torch.rand(blocks, generator=generator))
        wide = expand_scales(scale, (128, 128), value.shape)
        tensors[name] = (value / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name + SCALE] = scale
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, source / shard, {"format": "pt"})
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(source, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    return source


def edit(folder: Path, **changes: object) -> None:
    """Changes fields of config.json; None removes one."""
    hf = {**read_json(folder / "config.json"), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors[name.replace("__", ".")] = value
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})


def trained(run: Path, recipe: Recipe, tokenizer: str = "none") -> Transformer:
    """A run of a tiny model with one checkpoint: FP32 masters, biases that are not zero."""
    model = Transformer(CONFIG, recipe, dtype=torch.float32)
    optimizer = AdamW(weights(model))
    for name, _, value in initial_values(model, 3):
        optimizer.set_master(name, value)
    for i, (_, router) in enumerate(routers(model)):
        router.expert_bias.copy_(torch.randn(CONFIG.num_experts, generator=torch.Generator().manual_seed(i)) / 3)
    config = Config(
        run=RunConfig(dir=str(run)), model=CONFIG, fp8=Fp8Config(recipe=recipe.name), data=DataConfig(tokenizer=tokenizer)
    )
    Checkpointer(config, model, optimizer, Mesh.solo(), "", "").save(5, 40, None)
    return model


# ---------------------------------------------------------------- round trips


def test_golden_comes_back_bitwise(tmp_path: Path) -> None:
    assert call("import", GOLDEN, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out", "--shard-gb", 0.001) == 0
    same_bytes(read_all(tmp_path / "out"), load_file(GOLDEN / "model.safetensors"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    before, after = read_json(GOLDEN / "config.json"), read_json(tmp_path / "out/config.json")
    assert {k: after[k] for k in before} == before


def test_fp8_comes_back_bitwise(fp8_source: Path, tmp_path: Path) -> None:
    assert call("import", fp8_source, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out") == 0
    same_bytes(read_all(tmp_path / "out"), read_all(fp8_source))
    assert read_json(tmp_path / "out/config.json")["quantization_config"]["weight_block_size"] == [128, 128]


def test_an_imported_model_computes_the_golden_logits(tmp_path: Path) -> None:
    assert call("import", GOLDEN, tmp_path / "in") == 0
    config = import_config(read_json(GOLDEN / "config.json"), "golden")
    model = Transformer(config, Recipe.fp32(), dtype=torch.float32)
    load_masters(tmp_path / "in", model, Mesh.solo())
    golden = load_file(GOLDEN / "golden.safetensors")
    torch.testing.assert_close(model.eval().logits(golden["input_ids"]), golden["logits"], rtol=0, atol=1e-5)


def test_fp32_export_and_import_keep_every_master(tmp_path: Path) -> None:
    trained(tmp_path / "run", Recipe.fp32())
    assert call("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32", "--tokenizer", "none") == 0
    assert call("import", tmp_path / "out", tmp_path / "back") == 0
    ours = ShardReader(tmp_path / "run/checkpoints/step_00000005")
    back = ShardReader(tmp_path / "back")
    kept = {name for name in ours.names() if name.startswith(("master.", "expert_bias."))}
    assert kept == back.names()
    for name in kept:
        assert torch.equal(ours.read(name), back.read(name)), name


def test_trained_fp8_bytes_go_out_without_a_second_rounding(tmp_path: Path) -> None:
    model = trained(tmp_path / "run", Recipe.block())
    assert call("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp8", "--tokenizer", "none") == 0
    tensors, named = read_all(tmp_path / "out"), dict(weights(model))
    for part in parts(CONFIG):
        weight, value = named[part.name], tensors[part.hf_name]
        trained_value = weight.q.dequantize()[part.index]
        if part.fp8:
            assert torch.equal(weight.data[part.index].view(torch.uint8), value.view(torch.uint8)), part.hf_name
            value = value.float() * expand_scales(tensors[part.hf_name + SCALE], (128, 128), value.shape)
        if part.fp8 or part.name in ("head", "mtp.eh_proj"):
            assert torch.equal(value.float(), trained_value), part.hf_name
    assert call("import", tmp_path / "out", tmp_path / "back") == 0
    again = Transformer(CONFIG, Recipe.block(), dtype=torch.float32)
    load_masters(tmp_path / "back", again, Mesh.solo())
    for (name, a), (_, b) in zip(weights(model), weights(again), strict=True):
        if name.endswith((".qkv", ".out", ".gate_up", ".down", "head", "eh_proj")):
            assert torch.equal(a.q.dequantize(), b.q.dequantize()), name
    for (_, a), (_, b) in zip(routers(model), routers(again), strict=True):
        assert torch.equal(a.expert_bias, b.expert_bias)


def test_published_names_shapes_and_dtypes(tmp_path: Path) -> None:
    """Strict difference against the published format: engines skip names they do not know and serve random weights."""
    trained(tmp_path / "run", Recipe.block())
    assert call("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp8", "--tokenizer", "none") == 0
    tensors = read_all(tmp_path / "out")
    norms = ("input_layernorm", "post_attention_layernorm", "attention.query_layernorm", "attention.key_layernorm")
    layer = {f"model.layers.1.{k}" for k in (*(f"{n}.weight" for n in norms), "mlp.gate.weight", "mlp.gate.expert_bias")}
    quantised = ["attention.query_key_value", "attention.dense"]
    mlps = [*(f"mlp.experts.{e}" for e in range(CONFIG.num_experts)), "mlp.shared_experts"]
    quantised += [f"{mlp}.{p}_proj" for mlp in mlps for p in ("gate", "up", "down")]
    layer |= {f"model.layers.1.{k}.weight{suffix}" for k in quantised for suffix in ("", SCALE)}
    assert {name for name in tensors if name.startswith("model.layers.1.")} == layer
    extra = {n.removeprefix("model.layers.2.") for n in tensors if n.startswith("model.layers.2.")}
    mtp = {f"{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
    assert extra == mtp | {n.removeprefix("model.layers.1.") for n in layer}
    fp8 = {name for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    assert fp8 == {name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    for name, t in tensors.items():
        expected = torch.float32 if name.endswith((SCALE, "expert_bias")) else torch.bfloat16
        assert name in fp8 or t.dtype == expected, name
    assert tensors["model.layers.1.mlp.experts.0.up_proj.weight" + SCALE].shape == (1, 1)


def test_mtp_is_kept_as_the_extra_layer_or_dropped(tmp_path: Path) -> None:
    assert call("import", GOLDEN, tmp_path / "with") == 0
    assert call("import", GOLDEN, tmp_path / "without", "--mtp", "drop") == 0
    for source, flags, layers in (("with", ["--mtp", "drop"], 3), ("without", [], 3), ("with", [], 4)):
        out = tmp_path / f"out{source}{len(flags)}"
        assert call("export", tmp_path / source, out, *flags) == 0
        assert len({n.split(".")[2] for n in read_all(out) if n.startswith("model.layers.")}) == layers
        assert read_json(out / "config.json")["num_nextn_predict_layers"] == layers - 3


def test_tokenizer_and_code_files_travel_both_ways(source: Path, tmp_path: Path) -> None:
    train_tokenizer(["to be or not to be, that is the question\n" * 20], 280, str(source / "tokenizer.model"))
    (source / "modeling_bailing_moe_v2.py").write_text("# code\n")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert call("import", source, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out") == 0
    for name in ("tokenizer.model", "modeling_bailing_moe_v2.py", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    # A run's own tokenizer goes with its export.
    trained(tmp_path / "run", Recipe.block(), str(source / "tokenizer.model"))
    assert call("export", tmp_path / "run", tmp_path / "mine") == 0
    assert (tmp_path / "mine/tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    assert read_json(tmp_path / "mine/config.json")["eos_token_id"] == 2


def test_both_forms_of_rope_and_partial_rotary_are_written_and_either_is_read() -> None:
    hf = read_json(GOLDEN / "config.json")
    config = import_config({**hf, "rope_theta": 600000.0}, "")
    out = export_config(config, hf, "bf16")
    assert out["rope_theta"] == out["rope_parameters"]["rope_theta"] == 600000.0
    assert out["partial_rotary_factor"] == 0.5 and out["rotary_dim"] == 16
    for dropped in (("rope_theta", "partial_rotary_factor"), ("rope_parameters", "partial_rotary_factor"), ("rotary_dim",)):
        again = import_config({k: v for k, v in out.items() if k not in dropped}, "")
        assert again == config, dropped


# ---------------------------------------------------------------- bad input


def spoil_truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1000])


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}})
    )


GATE = "model.layers.1.mlp.gate"
BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "no tensors": (lambda f: (f / "model.safetensors").unlink(), "holds neither"),
    "truncated": (spoil_truncate, "model.safetensors is truncated"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "not a safetensors file"),
    "missing shard": (spoil_index, "model-00002-of-00002.safetensors"),
    "missing tensor": (lambda f: edit_tensors(f, lm_head__weight=None), "lm_head.weight is missing"),
    "unknown tensor": (lambda f: edit_tensors(f, foo__bar=torch.zeros(1)), "foo.bar is no tensor of this model"),
    "wrong shape": (
        lambda f: edit_tensors(f, lm_head__weight=torch.zeros(511, 128, dtype=torch.bfloat16)),
        "lm_head.weight has shape [511, 128]; config.json implies [512, 128]",
    ),
    "wrong dtype": (lambda f: edit_tensors(f, lm_head__weight=torch.zeros(512, 128, dtype=torch.int8)), "has dtype I8"),
    "bias cast": (
        lambda f: edit_tensors(f, **{f"{GATE}.expert_bias": torch.zeros(16, dtype=torch.bfloat16)}),
        f"{GATE}.expert_bias has dtype BF16, expected F32",
    ),
    "NaN": (lambda f: edit_tensors(f, lm_head__weight=torch.full((512, 128), float("nan"))), "lm_head.weight holds NaN"),
    "sizes contradict": (lambda f: edit(f, intermediate_size=384), "implies [384, 128]"),
    "size missing": (lambda f: edit(f, hidden_size=None), "has no 'hidden_size'"),
    "size is text": (lambda f: edit(f, hidden_size="big"), "cannot be imported"),
    "no MTP tensors": (lambda f: edit(f, num_hidden_layers=4), "model.layers.4.enorm.weight is missing"),
    "MTP not announced": (lambda f: edit(f, num_nextn_predict_layers=0), "--mtp drop"),
    "other model": (lambda f: edit(f, architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
    "other activation": (lambda f: edit(f, hidden_act="gelu"), "hidden_act = 'gelu'"),
    "yarn": (lambda f: edit(f, rope_scaling={"type": "yarn", "factor": 4.0}), "rope scaling"),
    "two thetas": (lambda f: edit(f, rope_parameters={"rope_theta": 600000.0}), "rope_theta = 10000.0 but"),
    "no rotary key": (lambda f: edit(f, partial_rotary_factor=None), "neither partial_rotary_factor nor rotary_dim"),
    "FP8 config, BF16 weights": (
        lambda f: edit(f, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "no tensor is FP8",
    ),
    "other quantisation": (lambda f: edit(f, quantization_config={"quant_method": "awq"}), "quantization_config has"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_sources_end_with_one_message_and_leave_nothing(
    case: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = BAD[case]
    spoil(source)
    assert call("import", source, tmp_path / "in") == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_fp8_without_scales_or_with_bad_ones_is_refused(
    fp8_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.0.attention.dense.weight"
    shard = fp8_source / read_json(fp8_source / "model.safetensors.index.json")["weight_map"][name + SCALE]
    tensors = load_file(shard)
    for value, message in ((torch.zeros(1, 1), "positive finite"), (torch.zeros(2, 2), "has shape [2, 2]")):
        save_file({**tensors, name + SCALE: value}, shard)
        assert call("import", fp8_source, tmp_path / "in") == 2
        assert message in capsys.readouterr().err
    index = read_json(fp8_source / "model.safetensors.index.json")
    del index["weight_map"][name + SCALE], tensors[name + SCALE]
    save_file(tensors, shard)
    (fp8_source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert call("import", fp8_source, tmp_path / "in") == 2
    assert f"{name}{SCALE} is missing" in capsys.readouterr().err
    edit(fp8_source, quantization_config=None)
    assert call("import", fp8_source, tmp_path / "in") == 2
    assert f"{name} has dtype F8_E4M3, expected BF16" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["import", "export"])
def test_an_output_that_is_not_empty_is_left_alone(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("x")
    assert call("import", GOLDEN, tmp_path / "in") == 0
    assert call(command, GOLDEN if command == "import" else tmp_path / "in", tmp_path / "out") == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_disk_that_fills_up_leaves_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("import", GOLDEN, tmp_path / "in") == 0
    write, seen = TensorWriter.write, []

    def failing(self: TensorWriter, name: str, value: Tensor) -> None:
        seen.append(name)
        if len(seen) == 50:
            raise OSError(28, "No space left on device")
        write(self, name, value)

    monkeypatch.setattr(TensorWriter, "write", failing)
    assert call("export", tmp_path / "in", tmp_path / "out") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("import", GOLDEN, tmp_path / "in") == 0
    file = tmp_path / "in/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert call("export", tmp_path / "in", tmp_path / "out") == 2
    assert "shorter than" in capsys.readouterr().err
    assert call("export", tmp_path / "nowhere", tmp_path / "out") == 2
    assert "no checkpoint at" in capsys.readouterr().err


def test_large_tensors_pass_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row slab of 128 rows at a time gives the same files: what keeps a 1T model within a few GB."""
    monkeypatch.setattr("tools.hf_import.SLAB", 1)
    monkeypatch.setattr("tools.hf_export.SLAB", 1)
    assert call("import", GOLDEN, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out") == 0
    same_bytes(read_all(tmp_path / "out"), load_file(GOLDEN / "model.safetensors"))
    chunks = ShardReader(tmp_path / "in")._tensors["master.embedding"].chunks
    assert len(chunks) == 4


def test_reader_refuses_missing_pieces(tmp_path: Path) -> None:
    from training.streaming import ShardWriter

    writer = ShardWriter(tmp_path)
    writer.add("w", (4, 4), (0, 0), torch.ones(2, 4))
    writer.finish()
    assert torch.equal(ShardReader(tmp_path).read("w", (slice(0, 2), slice(1, 3))), torch.ones(2, 2))
    with pytest.raises(UserError, match="8 of 16 values"):
        ShardReader(tmp_path).read("w")
