"""How other libraries are asked: each name is there, with the arguments that it gets, and people see it."""

import ast
import dataclasses
import importlib
import inspect
from string import Template

import pytest
from typer.testing import CliRunner

from harness.cli import commands
from harness.contract import plugins
from harness.contract.place import Place
from harness.records import Applied, Case
from harness.report import counterparts

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

OF_OTHERS = {"peft", "optax", "torchao", "bitsandbytes", "liger_kernel", "cut_cross_entropy", "datasets"}
"""Libraries that no test needs: their names are checked where they are installed."""
STANDS_FOR = {
    "model.to": "torch.nn.Module.to",
    "model.generate": "transformers.GenerationMixin.generate",
    "rows.unfold": "torch.Tensor.unfold",
    "parameter.register_post_accumulate_grad_hook": "torch.Tensor.register_post_accumulate_grad_hook",
    "p.astype": "numpy.ndarray.astype",
    "tokenizer": "transformers.PreTrainedTokenizerBase.__call__",
    "partial": "functools.partial",
}
"""What the names of a reader's own code are, where something is called of them."""


@pytest.fixture(scope="module")
def strategies():
    return plugins.load().strategies


def code_of(strategies, name, key):
    knobs = {knob.name: knob.default for knob in strategies[name].knobs.values()}
    return Template(counterparts.entries()[name][key]).substitute(knobs)


def resolved(dotted):
    """Return what a dotted name of an installed library is; raises AttributeError where that has no such name."""
    module, *rest = dotted.split(".")
    there = importlib.import_module(module)
    for at, name in enumerate(rest):
        try:
            there = getattr(there, name)
        except AttributeError:
            there = importlib.import_module(".".join([module, *rest[: at + 1]]))
    return there


def called(text):
    """Yield each call in an expression: what is called, and how."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Call):
            yield ast.unparse(node.func), node


def fits(function, call):
    """Check that a function takes the arguments of a call, bound or not."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return True
    for own in ([], [None]):
        try:
            signature.bind(*own, *([None] * len(call.args)), **{each.arg: None for each in call.keywords})
        except TypeError:
            continue
        return True
    return False


EXPRESSIONS = [
    (name, key)
    for name, known in counterparts.entries().items()
    for key in ("torch", "jax", "transformers", "model")
    if key in known
]


def test_each_entry_is_of_a_strategy_and_says_something(strategies):
    keys = {*counterparts.FORMS, "note"}
    for name, known in counterparts.entries().items():
        assert name in strategies
        assert set(known) <= keys and set(known) - {"note"}, name
        assert "torch" not in known or "torch" in strategies[name].on, name
        assert "jax" not in known or "jax" in strategies[name].on, name


@pytest.mark.parametrize(("name", "key"), EXPRESSIONS)
def test_what_is_called_is_there_and_takes_its_arguments(strategies, name, key):
    if key == "model" or key == "transformers":
        pytest.importorskip("transformers", reason="needs transformers")
    text = code_of(strategies, name, key)
    for dotted, call in called(f"made({text})" if key == "model" else text):
        dotted = STANDS_FOR.get(dotted, dotted)
        if dotted == "made":
            continue
        library = dotted.split(".")[0]
        if library in OF_OTHERS:
            pytest.importorskip(library, reason=f"needs {library}")
        assert fits(resolved(dotted), call), ast.unparse(call)


def is_there(dotted):
    try:
        resolved(dotted)
    except (AttributeError, ImportError):
        return False
    return True


def test_what_is_named_without_a_call_is_there(strategies):
    names = set()
    for name, key in EXPRESSIONS:
        for node in ast.walk(ast.parse(f"made({code_of(strategies, name, key)})")):
            dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            names |= {dotted} if dotted.startswith(("torch.", "jax.", "numpy.")) else set()
    assert "torch.bfloat16" in names and not [each for each in sorted(names) if not is_there(each)]


def test_arguments_of_the_trainer_are_its_own(strategies):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
    rules = {each.value for each in transformers.training_args.OptimizerNames}
    for name, known in counterparts.entries().items():
        if "trainer" in known:
            made = ast.parse(f"made({code_of(strategies, name, 'trainer')})", mode="eval").body
            arguments = {each.arg: ast.literal_eval(each.value) for each in made.keywords}
            assert set(arguments) <= set(fields), name
            assert arguments.get("optim", "sgd") in rules, name
            for argument, value in arguments.items():
                assert value in fields[argument].metadata.get("choices", [value]), name


def test_arguments_of_from_pretrained_are_its_own(strategies):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    taken = inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    for name, known in counterparts.entries().items():
        if "model" in known:
            (call,) = [
                call for called_, call in called(f"made({code_of(strategies, name, 'model')})") if called_ == "made"
            ]
            assert all(f'"{each.arg}"' in taken for each in call.keywords), name


def case(place, *applied):
    return Case(workload="decoder", place=Place.parse(place), corpus="zipf", tokenizer="", shape={}, strategies=applied)


def test_a_combination_is_one_call_of_each_kind(strategies):
    applied = [Applied(name="checkpoint"), Applied(name="accumulate", knobs={"pieces": 8}), Applied(name="bfloat16")]
    text = counterparts.of_choice(case("torch/cuda", *applied), strategies)
    assert "TrainingArguments(folder, gradient_checkpointing=True, gradient_accumulation_steps=8)" in text
    assert 'AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16")  # bfloat16' in text
    assert text.count("TrainingArguments") == 1
    assert "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # checkpoint" in text
    assert "jax" not in text


def test_jax_is_shown_for_jax_alone(strategies):
    text = counterparts.of_choice(case("jax/cpu", Applied(name="checkpoint")), strategies)
    assert "jax.checkpoint(block)  # checkpoint" in text
    assert "torch" not in text and "transformers" not in text


def test_what_is_known_nowhere_is_named(strategies):
    text = counterparts.of_choice(case("torch/cpu", Applied(name="checkpoint"), Applied(name="reversible")), strategies)
    assert "- without a known counterpart: `reversible`; `harness show` names the code" in text
    assert counterparts.of_choice(case("torch/cpu", Applied(name="reversible")), strategies) == ""
    assert counterparts.of_choice(case("torch/cpu"), strategies) == ""


def test_show_names_them_with_the_knobs_defaults():
    shown = CliRunner().invoke(commands.app, ["show", "accumulate"]).output
    assert "    transformers  TrainingArguments(folder, gradient_accumulation_steps=4)\n" in shown
    assert "in your own code" not in CliRunner().invoke(commands.app, ["show", "reversible"]).output
