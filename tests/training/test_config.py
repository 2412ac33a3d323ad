"""Configuration: what people type wrong, and that every key does something."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT
from training.config import Config, load_config
from training.config_loading import leaves, parse_scalar
from training.errors import UserError, counted
from training.summary import describe

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def message(path: str, *overrides: str, world_size: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, world_size)
    return str(caught.value)


TINY = str(ROOT / "configs/tiny.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_presets_load_and_are_short(path: Path) -> None:
    config = load_config(str(path))
    assert config.run.dir == f"runs/{path.stem}"
    assert len(path.read_text().splitlines()) <= 60


def test_tiny_also_fits_tp4() -> None:
    load_config(TINY, ["parallel.tp=4", "parallel.ep=4"], world_size=4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("off", "off"), ("no", "no"), ("1_000", "1_000"), ("010", 10), ("0x10", 16), ("true", True),
     ("2026-01-01", "2026-01-01"), ("~", None), ("", None), (".5", 0.5), ("1.", 1.0), ("12:30", "12:30"),
     ("[a, 2]", ["a", 2]), ("+7", 7)],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert parse_scalar(text) == value and type(parse_scalar(text)) is type(value)


def test_overrides_win_over_the_file_and_later_ones_win(tmp_path: Path) -> None:
    path = write(tmp_path, "optim:\n  lr: 1.0\n")
    config = load_config(path, ["optim.lr=3e-4", "optim.lr=2e-4", "train.steps=7", "run.name=007", "log.wandb=off"])
    assert (config.optim.lr, config.train.steps, config.run.name, config.log.wandb) == (2e-4, 7, "007", "off")


def test_integers_are_fine_where_floats_are_asked_but_not_the_reverse(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert load_config(path, ["optim.lr=1"]).optim.lr == 1.0
    assert "train.steps=1.5" in message(path, "train.steps=1.5")
    assert "train.steps=True" in message(path, "train.steps=true")


def test_unknown_key_names_the_nearest_and_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, "optim:\n  lr: 1\n  warmup_step: 3\nmodle:\n  hidden_size: 5\n")
    text = message(path, "lr=3e-4", "zzz.qqq=1")
    assert f"{path}:3: optim.warmup_step is not a key; did you mean optim.warmup_steps?" in text
    assert f"{path}:4: modle is not a key" in text
    assert "command line: lr is not a key; did you mean optim.lr?" in text
    assert "zzz.qqq is not a key" in text


def test_only_near_names_are_suggested() -> None:
    """A common section is no likeness; a key's own name in another section is."""
    for key, near in (
        ("model.bogus", None), ("zzz.qqq", None), ("model.topk_grop", "model.topk_group"), ("optm.lr", "optim.lr"),
        ("train.lr", "optim.lr"), ("trian.stepz", "train.steps"), ("model.seq_len", "data.seq_len"),
    ):  # fmt: skip
        said = message(TINY, f"{key}=1")
        assert (f"{key} is not a key; did you mean {near}?" in said) if near else said.endswith("is not a key"), said


def test_messages_name_keys_and_count_in_words() -> None:
    said = message(TINY, "model.hidden_size=200", "parallel.tp=16", "train.global_batch=16", world_size=16)
    assert "model.hidden_size = 200 is not a multiple of 128" in said and "model hidden" not in said
    assert "model.num_attention_heads 8 is not a multiple of tp 16" in said
    assert "parallel.tp = 0 must be at least 1" in message(TINY, "parallel.tp=0")
    assert "here are 1 process and" in message(TINY, "parallel.simulated_ranks=3")
    assert (counted(1, "GPU"), counted(2000, "GPU"), counted(0, "process", "processes")) == ("1 GPU", "2,000 GPUs", "0 processes")
    assert "1 micro-batch of 4 a step" in describe(load_config(TINY), 1)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, "optim:\n  lr: fast\n  bta1: 0.9\ndata:\n  seq_len: -3\n  source: text\n")
    overrides = "train.global_batch=10 train.micro_batch=4 model.num_experts_per_tok=999 model.hidden_size=200 "
    overrides += "optim.schedule=linear fp8.recipe=fp9 parallel.tp=3 checkpoint.keep=0"
    text = message(path, *overrides.split(), world_size=2)
    for part in (
        "optim.lr='fast'",
        "did you mean optim.beta1",
        "data.seq_len=-3 is not positive",
        "data.source=text needs data.paths",
        "train.global_batch=10 is not a multiple of train.micro_batch=4",
        "999",
        "optim.schedule='linear'",
        "fp8.recipe=fp9 is unknown; known: block",
        "world size 2 is not a multiple of tp 3",
        "checkpoint.keep=0 must be at least 1",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert text.startswith(f"{path}: 15 problems")


def test_the_model_may_have_more_rows_than_the_tokenizer_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {vocab_size: 1024}\ndata: {vocab_size: 512}")
    assert load_config(path).data.vocab_size == 512
    assert load_config(path, ["data.vocab_size=1024"]).data.vocab_size == 1024
    said = message(path, "data.vocab_size=1025")
    assert "data.vocab_size=1025 is more than model.vocab_size=1024: every token of the tokenizer needs a row in the model" in said


def test_initial_values_have_a_largest_deviation(tmp_path: Path) -> None:
    """1e20 gives a model whose loss is ln V for ever."""
    text = message(write(tmp_path, "model: {initializer_range: 101.0, embedding_init_std: 1.0e20}"))
    assert all(part in text for part in ("initializer_range = 101.0 must be at most 100", "embedding_init_std = 1e+20 must be at"))
    assert load_config(write(tmp_path, "model: {initializer_range: 0.05, embedding_init_std: 100}")).model.embedding_init_std == 100


def test_fp8_blocks_name_both_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert "hidden_size = 200 is not a multiple of 128" in message(path, "model.hidden_size=200")
    load_config(path, ["model.hidden_size=200", "fp8.recipe=bf16"])


def test_every_width_that_tp_splits_is_checked(tmp_path: Path) -> None:
    """In FP8 also that its parts are whole blocks; the routed experts' width is never split."""
    path, four = write(tmp_path, ""), ["parallel.tp=4", "model.num_shared_experts=1", "model.num_key_value_heads=4"]
    odd = ["model.moe_intermediate_size=130", "model.intermediate_size=514", "model.vocab_size=32001"]
    text = message(path, "fp8.recipe=bf16", *four, *odd, world_size=4)
    for part in ("shared expert's width 130", "model.intermediate_size 514", "model.vocab_size 32001"):
        assert f"{part} is not a multiple of tp 4" in text, text
    text = message(path, *four, "model.moe_intermediate_size=128", world_size=4)
    assert "shared expert's width = 128 is not a multiple of 512 (128-wide FP8 blocks, tp 4)" in text
    load_config(path, ["fp8.recipe=bf16", *four, "model.moe_intermediate_size=132"], world_size=4)


def test_wsd_needs_its_decay(tmp_path: Path) -> None:
    assert "optim.decay_steps=0 must be at least 1" in message(write(tmp_path, ""), "optim.schedule=wsd")


def test_file_mistakes(tmp_path: Path) -> None:
    assert "cannot read config nowhere.yaml" in message("nowhere.yaml")
    assert "is not YAML" in message(write(tmp_path, "a: [1,\n"))
    assert "is not YAML" in message(write(tmp_path, "run:\n  dir: !!python/object/apply:os.system ['true']\n"))
    assert "stands twice" in message(write(tmp_path, "optim:\n  lr: 1\n  lr: 2\n"))
    assert "must hold `key: value` lines" in message(write(tmp_path, "- 1\n"))
    assert "optim must hold" in message(write(tmp_path, "optim: 3\n"))
    load_config(write(tmp_path, "optim:\n# lr: 1\n"))


def test_override_mistakes(tmp_path: Path) -> None:
    text = message(write(tmp_path, ""), "optim", "optim={lr: 1}", "optim.lr=nan", "optim.lr=.inf", "train.device=tpu")
    assert "in brackets: 'data.paths=[texts/*.txt]'" in message(write(tmp_path, ""), "data.paths=texts/*.txt")
    assert "valid integer" in message(write(tmp_path, ""), "train.steps=1.5")
    for part in ("'optim' is not of the form", "optim is a section", "optim.lr=", "should be 'auto', 'cpu' or 'cuda'"):
        assert part in text


def test_config_survives_a_round_trip(tmp_path: Path) -> None:
    config = load_config(TINY, ["run.name=1e3", "data.source=text", "data.paths=['a', 'off']", "log.entity=~"])
    assert load_config(write(tmp_path, config.to_yaml())) == config
    assert config.run.name == "1e3"
    assert load_config(TINY, ["train.steps=1e3", "data.max_bytes=1.5e6"]).train.steps == 1000


def test_sections_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optim.lr = 1.0  # type: ignore[misc]


def attributes_read(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(owner, attribute) of every attribute that is read, `getattr(owner, name)` over a tuple of names included.

    Functions that only check do not count as readers.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and (child.name.endswith("problems") or child.name == "__post_init__"):
            continue
        if isinstance(child, ast.FunctionDef):
            calls = [n for n in ast.walk(child) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "getattr"]
            owners = {n.args[0].id for n in calls if isinstance(n.args[0], ast.Name)}
            yield from ((o, n.value) for o in owners for n in ast.walk(child) if isinstance(n, ast.Constant))
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
            yield (child.value.attr if isinstance(child.value, ast.Attribute) else getattr(child.value, "id", "")), child.attr
        yield from attributes_read(child)


def test_no_key_is_ignored() -> None:
    """Each key is read as an attribute somewhere in the source, beyond the checks of the configuration itself."""
    folders = ("training", "model", "tools", "parallel", "fp8")
    paths = [ROOT / "train.py", *(p for folder in folders for p in (ROOT / folder).glob("*.py"))]
    read = {pair for path in paths if path != ROOT / "training/config.py" for pair in attributes_read(ast.parse(path.read_text()))}
    # Sections with a reader of their own travel as `config` there; the others are read as section.key.
    own_name = {"run", "train", "optim", "parallel", "checkpoint", "eval", "log"}
    ignored = []
    for key in leaves(Config):
        section, name = key.split(".")[-2:]
        owners = {section} if section in own_name else {section, "config", "c", "self"}
        if not any((owner, name) in read for owner in owners):
            ignored.append(key)
    assert not ignored, f"keys that nothing reads: {ignored}"
