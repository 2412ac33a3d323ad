"""Hugging Face folders in and out: bitwise round trips and the published format. Bad input: test_convert_hf_bad_input.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8.quantized import expand_scales
from fp8.recipe import Recipe
from fp8.weight import weights
from model.huggingface import load_hf, parts
from model.router import routers
from model.transformer import Transformer
from parallel.mesh import Mesh
from tests.model.tiny import CONFIG
from tests.tools.published import GOLDEN, SCALE, call, read_all, same_bytes, trained
from tools.hf_config import export_config, import_config
from tools.hf_files import read_json
from training.checkpoint import load_masters
from training.errors import UserError
from training.streaming import ShardReader
from training.tokenizer import load_tokenizer, train_tokenizer


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


def test_an_engine_that_reads_the_export_computes_the_golden_logits(tmp_path: Path) -> None:
    """Tensors through the safetensors library alone, config.json as it stands, no checkpoint of ours in between."""
    assert call("import", GOLDEN, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out", "--shard-gb", 0.001) == 0
    config = import_config(read_json(tmp_path / "out/config.json"), "")
    model = Transformer(config, Recipe.fp32(), dtype=torch.float32)
    named = dict(weights(model))
    for name, value in load_hf(model, read_all(tmp_path / "out")):
        named[name].set_(value)
    golden = load_file(GOLDEN / "golden.safetensors")
    torch.testing.assert_close(model.eval().logits(golden["input_ids"]), golden["logits"], rtol=0, atol=1e-5)


def test_an_fp8_export_is_within_half_a_code_of_the_masters(tmp_path: Path) -> None:
    """E4M3: 2^-4 of a normal value, 2^-10 of the scale below those; and the scales are powers of two that keep it below 448."""
    assert call("import", GOLDEN, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out", "--dtype", "fp8") == 0
    masters, tensors = load_file(GOLDEN / "model.safetensors"), read_all(tmp_path / "out")
    fp8 = [name for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn]
    assert len(fp8) > 100
    for name in fp8:
        scale, want = tensors[name + SCALE], masters[name].float()
        wide = expand_scales(scale, (128, 128), want.shape)
        error = (tensors[name].float() * wide - want).abs()
        assert (error <= torch.maximum(want.abs() * 2**-4, wide * 2**-10)).all(), name
        assert torch.equal(scale.log2(), scale.log2().round()) and torch.isfinite(tensors[name].float()).all()
    for name in tensors.keys() - set(fp8) - {n + SCALE for n in fp8}:
        assert torch.equal(tensors[name], masters[name]), name


def test_transformers_reads_config_and_tokenizer(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    bpe.train_from_iterator(["to be or not to be"] * 9, trainers.BpeTrainer(vocab_size=300, **options))
    bpe.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}')
    assert call("import", source, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out") == 0
    config = transformers.PretrainedConfig.from_pretrained(str(tmp_path / "out"))
    assert config.rope_theta == config.rope_parameters["rope_theta"] == 10000.0 and config.rotary_dim == 16
    assert config.architectures == ["BailingMoeV2ForCausalLM"] and config.num_experts == 16
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "out"))
    ours = load_tokenizer(str(tmp_path / "out"))
    text = "to be, or not: d\u00e9j\u00e0 vu <|endoftext|>"
    assert theirs.decode(ours.encode(text)) == text and theirs.eos_token_id == ours.eos_id
    assert theirs.encode(text[:-14], add_special_tokens=False) == ours.encode(text[:-14])


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
    theirs, ours = (load_tokenizer(str(tmp_path / "mine" / f"tokenizer.{kind}")) for kind in ("json", "model"))
    assert theirs.encode("to be or not") == ours.encode("to be or not") and theirs.eos_id == ours.eos_id
    assert read_json(tmp_path / "mine/config.json")["eos_token_id"] == 2


def test_both_forms_of_rope_and_partial_rotary_are_written_and_either_is_read() -> None:
    hf = read_json(GOLDEN / "config.json")
    config = import_config({**hf, "rope_theta": 600000.0}, "")
    out = export_config(config, hf, "bf16")
    assert out["rope_theta"] == out["rope_parameters"]["rope_theta"] == 600000.0
    assert out["partial_rotary_factor"] == 0.5 and out["rotary_dim"] == 16
    assert import_config({**out, "rope_scaling": {"type": "default"}}, "") == config
    for dropped in (("rope_theta", "partial_rotary_factor"), ("rope_parameters", "partial_rotary_factor"), ("rotary_dim",)):
        again = import_config({k: v for k, v in out.items() if k not in dropped}, "")
        assert again == config, dropped


def test_large_tensors_pass_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row slab of 128 rows at a time gives the same files: what keeps a 1T model within a few GB."""
    monkeypatch.setattr("tools.hf_import.SLAB", 1)
    monkeypatch.setattr("tools.hf_export.SLAB", 1)
    assert call("import", GOLDEN, tmp_path / "in") == 0
    assert call("export", tmp_path / "in", tmp_path / "out") == 0
    same_bytes(read_all(tmp_path / "out"), load_file(GOLDEN / "model.safetensors"))
    chunks = ShardReader(tmp_path / "in")._tensors["master.embedding"].chunks
    assert len(chunks) == 4


def test_the_disk_has_every_file_of_tensors_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import's and the export's: both end a file the same way, the last one too, with every byte handed on."""
    from tools.hf_files import Planned, TensorWriter
    from training.streaming import ShardWriter

    synced: dict[str, int] = {}

    def fsync(handle: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{handle}")).name] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fsync", fsync)
    shards = ShardWriter(tmp_path, max_file_bytes=1)
    tensors = TensorWriter(tmp_path, [Planned(name, "F32", (4,)) for name in "ab"], shard_bytes=1)
    for i, name in enumerate("ab"):
        shards.add(name, (4,), (0,), torch.ones(4))
        tensors.write(name, torch.ones(4))
        assert len(synced) == 2 * i
    shards.finish()
    tensors.finish()
    assert synced == {path.name: path.stat().st_size for path in tmp_path.iterdir()} and len(synced) == 6


def test_reader_refuses_missing_pieces(tmp_path: Path) -> None:
    from training.streaming import ShardWriter

    writer = ShardWriter(tmp_path)
    writer.add("w", (4, 4), (0, 0), torch.ones(2, 4))
    writer.finish()
    assert torch.equal(ShardReader(tmp_path).read("w", (slice(0, 2), slice(1, 3))), torch.ones(2, 2))
    with pytest.raises(UserError, match="8 of 16 values"):
        ShardReader(tmp_path).read("w")
