"""The models of examples/models have the numbers of Hugging Face; the pipeline.

And the programs for Flax are what they say."""

import re
import sys

import numpy as np
import pytest

import graftree as nnx
from examples.flax_programs import __main__ as for_flax
from examples.lm import layouts
from examples.lm.model import Config
from examples.models import __main__ as program, gpt2, llama, pretrained, qwen3
from examples.pipeline import __main__ as command, pipeline, training
from tests import programs, tables
from tests.weights import checkpoints_of_hf


@pytest.fixture
def checkpoint():
    """The folder of a Llama."""
    return checkpoints_of_hf.folder("llama")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_logits_and_tokens(name):
    folder = checkpoints_of_hf.folder(name)
    expected = checkpoints_of_hf.expected_of(folder)
    model = pretrained.load(folder)
    logits = programs.in_one_program(model, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    # Token 0 is padding where these were made: of qwen3's prompt one is left out.
    made = nnx.decoding.generate(model, expected["prompt"], max_new_tokens=16, pad=0)
    new = expected["generated"][:, expected["prompt"].shape[1] :]
    np.testing.assert_array_equal(made.tokens, new)


def test_tables_are_short():
    assert max(len(x.WEIGHTS) for x in (llama, qwen3, gpt2)) <= 20


@tables.cases(
    "config, said",
    ({"model_type": "bert"}, "model_type is 'bert'"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, "yarn"),
)
def test_other_families_and_positions_are_refused(config, said):
    with pytest.raises(ValueError, match=said):
        pretrained.family({"hidden_act": "silu", "rope_scaling": {}} | config)


# ------------------------------------------------------- python -m examples.models


@pytest.mark.long
def test_the_check_compares_logits_tokens_and_files(capsys):
    assert program.main([str(checkpoints_of_hf.folder("qwen3")), "--check"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    _, name, difference, tokens, files, _ = row.split("|")
    assert name.strip() == "qwen3" and float(difference) < 1e-4
    assert tokens.strip() == "16 of 16 equal, with pad=0: 1 left out"
    assert files.strip() == "4 of 4 equal"


@pytest.mark.long
def test_prompts_are_continued_and_the_model_is_saved(checkpoint, capsys, tmp_path):
    expected = checkpoints_of_hf.expected_of(checkpoint)
    prompt = ",".join(map(str, expected["prompt"][0]))
    options = ["llama", str(checkpoint), f"--prompt={prompt}", f"--save={tmp_path}"]
    assert program.main([*options, "--mesh=fsdp=8"]) == 0
    new = expected["generated"][0, expected["prompt"].shape[1] :]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == ",".join(map(str, new))
    assert printed[2].startswith("16 tokens, ")
    data = (checkpoint / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == data


@pytest.mark.long
def test_an_adapter_is_merged_before_it_is_saved(checkpoint, tmp_path):
    expected = checkpoints_of_hf.expected_of(checkpoint / "lora")
    options = [f"--adapter={checkpoint / 'lora'}", f"--save={tmp_path}"]
    assert program.main([str(checkpoint), *options]) == 0
    logits = programs.in_one_program(pretrained.load(tmp_path), expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)


def test_parameters_are_divided_along_their_longest_axis():
    def shares(*sizes):
        model = nnx.eval_shape(lambda: nnx.Linear(*sizes, rngs=nnx.Rngs(0)))
        found = pretrained.divided(model, pretrained.mesh_of(4))
        kernel, bias = found["kernel"].get_value(), found["bias"].get_value()
        return kernel.shard_shape(sizes), bias.shard_shape(sizes[1:])

    assert shares(6, 16) == ((6, 4), (4,)) and shares(3, 5) == ((3, 5), (5,))


@tables.cases(
    "options, said",
    (["bert", "llama"], "model_type is 'bert'; known are gpt2, llama and qwen3"),
    (["no/such"], "no/such/config.json can't be read: No such file"),
    (["llama/lora"], "llama/lora/config.json can't be read"),
    (["llama", "--prompt=1,128"], "no token 128: the vocabulary has 0 to 127"),
    (["llama", "--prompt=1,2", "--tokens=63"], "65 tokens, but the model takes 64"),
    (["llama", "--mesh=fsdp=9"], "there are 8 devices, not 9"),
    (["llama", "--adapter=/no/such"], "adapter_config.json"),
    ids=str,
)
def test_what_does_not_fit_is_said(checkpoint, options, said, capsys):
    *family, folder = [x for x in options if not x.startswith("--")]
    others = [x for x in options if x.startswith("--")]
    assert program.main([*family, str(checkpoint.parent / folder), *others]) == 2
    assert said in capsys.readouterr().err


def test_folders_without_weights_or_settings(checkpoint, capsys, tmp_path):
    for config, said in (
        ((checkpoint / "config.json").read_text(), "it contains no .safetensors file"),
        ('{"model_type": "gpt2"}', "gelu_new"),
        ("{", "is not JSON"),
    ):
        (tmp_path / "config.json").write_text(config)
        assert program.main([str(tmp_path)]) == 2
        assert said in capsys.readouterr().err


def test_options_that_are_malformed(capsys):
    for option, said in (
        ("--prompt=1,x", "expected numbers of tokens"),
        ("--mesh=x=2", "expected fsdp=N"),
    ):
        with pytest.raises(SystemExit, match="2"):
            program.main(["folder", option])
        assert said in capsys.readouterr().err


def test_text_needs_a_tokenizer(checkpoint, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert program.main([str(checkpoint), "--text=hello"]) == 2
    assert "pip install tokenizers" in capsys.readouterr().err


# ------------------------------------------------------------------------- the pipeline


CONFIG = Config(vocabulary=16, layers=4, width=8, heads=2, kv_heads=1, hidden=16)
STAGES, MICRO_BATCHES = 2, 3
TOKENS = np.random.default_rng(0).integers(16, size=(6, 9)).astype("int32")


@pytest.fixture(scope="module")
def layout():
    return layouts.make({pipeline.STAGE: STAGES})


@pytest.fixture(scope="module")
def objects(layout):
    return training.make(CONFIG, layout)


@pytest.mark.long
def test_loss_and_gradients_are_those_of_the_model_without_a_pipeline(layout, objects):
    with layout.in_force():
        call = training.loss_and_gradients
        loss, gradients = call(objects[0], TOKENS, layout.mesh, MICRO_BATCHES)
        expected, expected_gradients = call(objects[0], TOKENS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert training.largest_difference(gradients, expected_gradients) < 1e-5


def test_each_stage_has_its_layers_only(objects):
    for row in nnx.sharding.report(objects).rows:
        if "blocks" in row.path:
            assert row.local_shape == (2, *row.shape[1:]), row.path


def test_each_turn_sends_once_and_training_learns(layout, objects):
    with layout.in_force():
        step = training.train_step.lower(*objects, TOKENS, layout.mesh, MICRO_BATCHES)
        compiled = step.compile()
        losses = [compiled(*objects, TOKENS) for _ in range(5)]
    assert losses[-1] < losses[0]
    turns = pipeline.turns(STAGES, MICRO_BATCHES)
    sent = nnx.forecast.collectives(compiled)["collective-permute"]
    assert sent.count >= 2 * turns  # forward, and backward


def test_the_bubble_is_what_gpipe_says():
    assert pipeline.bubble_fraction(4, 4) == 3 / 7
    assert pipeline.bubble_fraction(1, 4) == 0.0


def test_what_does_not_come_out_even_is_refused(layout, objects, capsys):
    x = np.zeros((6, 8, 8), "float32")
    with pytest.raises(ValueError, match="6 rows in 4 micro-batches"):
        pipeline.apply(objects[0].blocks, x, layout.mesh, 4)
    for wrong in (["--layers=3"], ["--batch=3"], ["--steps=0"]):
        with pytest.raises(SystemExit):
            command.main(wrong)
    assert "can't share 3 layers" in capsys.readouterr().err


# -------------------------------------------------------------------- programs for Flax


@pytest.mark.long
@pytest.mark.parametrize("name", for_flax.NAMES)
def test_a_program_gives_the_losses_of_flax_and_reaches_its_goal(peer, name):
    rows = [*for_flax.lines([name])]
    assert len(rows) == 3 and rows[2].startswith(f"| {name} |"), rows


def test_every_program_is_listed():
    files = {path.stem for path in for_flax.FOLDER.glob("*.py")}
    assert files == {*for_flax.NAMES, "__init__", "__main__", "measure"}


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        for_flax.main(["gru"])
    assert "no program ['gru']; there are vae, " in capsys.readouterr().err


def test_help_lists_the_programs(capsys):
    with pytest.raises(SystemExit):
        for_flax.main(["--help"])
    printed = capsys.readouterr().out
    assert "weight_tying" in printed and "jraphx" in printed


def test_each_program_for_a_package_names_one_whose_version_is_pinned():
    asked = (for_flax.PACKAGES / "requirements.in").read_text()
    pins = set(re.findall(r"^\S+==\S+$", asked, re.MULTILINE))
    assert pins <= {*for_flax.requirements().splitlines()}  # with all that these need
    pinned = {pin.partition("==")[0] for pin in pins}
    texts = [path.read_text() for path in for_flax.PACKAGES.glob("*.py")]
    named = {text.partition(":")[0].removeprefix('"""') for text in texts}
    assert named == pinned - {"jax", "flax"} and len(named) == len(texts)
    assert not any("graftree" in text for text in texts)


def test_programs_know_nothing_of_graftree():
    for name in for_flax.NAMES:
        text = (for_flax.FOLDER / f"{name}.py").read_text()
        assert "from flax import nnx\n" in text and "graftree" not in text
