"""Published decoders: the parts compute what transformers computes, sizes are those that were published."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError

from harness import Place, backends
from harness.backends import cards
from harness.contract import plugins
from harness.contract.assembly import assemble
from harness.records import Applied, Case, Task
from harness.worker import numerics, prediction, tasks
from harness.workloads.causal_lm import Shape, configs, parameters, probe, reduced, resizing, tiny
from harness.workloads.causal_lm.cut import CutError
from harness.workloads.causal_lm.proven import cut
from harness.workloads.user_model.kinds import kinds_of

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
LOADED = plugins.load()

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "phi-3-mini": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "phi-2": 2_779_683_840,
    "gpt-j-6b": 6_050_882_784,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-h-tiny": 6_939_037_248,
    "nemotron-nano-9b-v2": 8_888_227_328,
}
"""As the files of their weights count them."""
ARCHITECTURES = {configs.read(name)["model_type"]: name for name in sorted(configs.published(), reverse=True)}


@pytest.mark.parametrize("name", configs.published())
def test_a_published_configuration_has_the_parameters_that_were_published(name):
    assert parameters(Shape(config=name)) == PARAMETERS[name]


def whole(shape, attention):
    """Make the model of a shape by transformers alone."""
    values = shape.values()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def in_parts(shape, values):
    """Build the parts of a shape, and a state of these values by the names that transformers has for them."""
    parts = LOADED.workloads["causal_lm"].on["torch"](shape, Place("torch", "cpu"), None, 0)
    heads = ("lm_head.weight", "embed_out.weight")

    def draw(parts, name, size, deviation):
        group, _, rest = name.partition(".")
        if group == "layers":
            at, _, rest = rest.partition(".")
            rest = f"{at}.{rest.partition('.')[2]}"
        own = min((own for own in values if (own in heads if group == "head" else own.endswith(f".{rest}"))), key=len)
        value = values[own].detach().clone()
        if group == "head" and "lm_head.bias" in values:
            value = torch.cat([value, values["lm_head.bias"].detach()[:, None]], 1)
        assert value.shape == size
        return value

    parts = replace(parts, draw=draw)
    return parts, parts.init(parts, None)


ALIBI = {"model_type": "bloom", "n_layer": 3, "n_head": 16, "hidden_size": 1024, "vocab_size": 250_880}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "vocab_size": 65_024,
    "multi_query": True,
    "new_decoder_architecture": False,
}
GPT_NEO = {
    "model_type": "gpt_neo",
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 16,
    "vocab_size": 50_257,
    "max_position_embeddings": 2048,
    "window_size": 256,
    "attention_layers": ["global", "local"] * 12,
    "attention_types": [[["global", "local"], 12]],
}
GRANITE = {
    "model_type": "granite",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 49_155,
    "max_position_embeddings": 131_072,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}
COHERE = {
    "model_type": "cohere2",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "logit_scale": 0.25,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
LLAMA_4 = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "vocab_size": 202_048,
    "max_position_embeddings": 10_485_760,
    "tie_word_embeddings": False,
}
ERNIE = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "vocab_size": 103_424,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
BAMBA = {
    "model_type": "bamba",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_expand": 2,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "vocab_size": 128_256,
    "max_position_embeddings": 4096,
}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 256,
    "vocab_size": 65_536,
    "max_position_embeddings": 262_144,
}
LFM2 = {
    "model_type": "lfm2_moe",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)],
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 65_536,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262_144,
    "max_position_embeddings": 262_144,
}
OTHERS = {
    "logits that are divided": (GRANITE, 2_533_531_648),
    "logits that are scaled": (COHERE, 8_028_033_024),
    "an attention of its own": (FALCON, 6_921_720_704),
    "no positions": (ALIBI | {"n_layer": 24}, 559_214_592),
    "lists that are repeated": (GPT_NEO, 1_315_575_808),
    "a model that is its own base": (LLAMA_4, 107_769_861_120),
    "parameters that are not trained": (ERNIE, 21_825_436_160),
    "layers that return two values": (BAMBA, 9_780_235_392),
    "matrices that a layer multiplies by itself": (JAMBA, 51_570_323_328),
    "convolutions between attention": (LFM2, 8_339_929_856),
    "heads of two widths": (GEMMA_4, 25_233_141_760),
}
"""Values of architectures that no published name is for, and the parameters that their files of weights have."""


@pytest.mark.parametrize("case", OTHERS)
def test_an_architecture_beyond_the_published_names_has_its_parameters(case):
    values, count = OTHERS[case]
    assert parameters(Shape(config=values, tokens=16)) == count


ROUNDING = {"heads of two widths": 1e-4}
"""Where gradients are rounded more than elsewhere: Gemma 4 does not scale its scores, and the parts unscale queries."""


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *OTHERS])
def test_loss_and_gradients_are_those_of_transformers(kind):
    shape = probe(Shape(config=OTHERS[kind][0] if kind in OTHERS else ARCHITECTURES[kind]))
    model = whole(shape, "eager" if kind in ("gemma2", "gpt_oss") else None)
    named = dict(model.named_parameters())
    parts, state = in_parts(shape, named)
    ids = torch.randint(2, 67, (3, 37), generator=torch.Generator().manual_seed(1))
    labels = torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.2, -100, ids)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    own, grads = parts.grad(parts, state, ids[:, :-1], labels[:, 1:])
    assert own == pytest.approx(loss.item(), rel=1e-6)
    _, expected = in_parts(shape, {name: p.grad for name, p in named.items()})
    pairs = zip(*(backends.load("torch").arrays(each).items() for each in (grads, expected["params"])), strict=True)
    for (name, (one, _)), (other_name, (two, _)) in pairs:
        assert name == other_name
        assert abs(one - two).max() <= ROUNDING.get(kind, 1e-5) * abs(two).max() + 1e-8, name


def case(name, *strategies, shape=probe, **sizes):
    return Case(
        workload="causal_lm",
        shape=shape(Shape(config=name, **sizes)).model_dump(),
        place="torch/cpu",
        corpus="drawn",
        tokenizer="none",
        strategies=tuple(Applied(name=each) for each in strategies),
    )


def predicted(case):
    task = Task(kind="predict", cases=(case,), run_id="", parent=0, folder="", steps=2)
    return prediction.measure(task, LOADED, backends.load("torch"))


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *OTHERS])
def test_every_architecture_is_predicted(kind):
    record = predicted(case(OTHERS[kind][0] if kind in OTHERS else ARCHITECTURES[kind]))
    figures = record.prediction
    assert figures.predicted_peak_bytes is not None, record.missing
    assert figures.predicted_peak_bytes >= figures.floor_bytes


@pytest.mark.parametrize("config", ["gemma-2-2b", FALCON], ids=["capped scores", "an attention of its own"])
def test_a_strategy_of_attention_that_no_layer_calls_is_not_predicted(config):
    record = predicted(case(config, "chunked_attention"))
    assert record.prediction.predicted_peak_bytes is None
    assert "'chunked_attention' rewrote 'attend', but it was never called" in record.missing["predicted_peak_bytes"]


def test_sizes_that_a_file_leaves_out_are_those_of_the_architecture():
    """As in the files of Gemma 3, whose text decoder has the usual heads, and of BLOOM, which has no last position."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10_240}
    shape = Shape(config={"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert shape.vocabulary == 262_208 and parameters(shape) == PARAMETERS["gemma-3-4b"]
    assert Shape(config=ALIBI, tokens=1 << 20).tokens == 1 << 20
    with pytest.raises(ValidationError, match="4,096 tokens are more than the 2,048 positions of falcon"):
        Shape(config=FALCON, tokens=4096)


def test_what_follows_from_a_size_follows_from_that_of_the_file():
    """A head of LLaMA is the width by the heads, and GPT-2 has as many positions as its class, by a name of its own."""
    values = configs.read({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    assert (values["num_attention_heads"], values["head_dim"], values["vocab_size"]) == (32, 2, 32_000)
    unsaid = {key: value for key, value in configs.read("gpt2").items() if key not in ("n_positions", "n_head")}
    assert Shape(config=unsaid, tokens=1024) and configs.of(configs.read(unsaid), "num_attention_heads") == 12
    with pytest.raises(ValidationError, match="2,048 tokens are more than the 1,024 positions of gpt2"):
        Shape(config=unsaid, tokens=2048)


def test_a_model_larger_than_the_machine_is_cut_without_its_memory():
    experts = {"n_routed_experts": 1 << 20, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    values = BARE | {"model_type": "glm4_moe", "moe_intermediate_size": 1 << 16} | experts
    assert parameters(Shape(config=values, layers=2)) > 1 << 44, "64 TiB of them"


def test_a_strategy_of_attention_is_called_by_every_layer_without_a_window():
    calls = []
    parts = assemble(LOADED, case("gemma-3-1b", tokens=2048))
    inner = parts.attend
    watched = replace(parts, attend=lambda *args: calls.append(1) or inner(*args))
    state = parts.init(parts, None)
    ids = torch.randint(2, 67, (2, 37))
    parts.grad(watched, state, ids, ids)
    assert len(calls) == 1, "of six layers five see 16 tokens alone"


def test_no_mask_is_predicted_that_no_run_has():
    def of(tokens):
        shape = partial(reduced, layers=1, vocabulary=67, batch=1, tokens=tokens)
        return predicted(case("qwen3-8b", shape=shape)).prediction.predicted_peak_bytes

    assert of(8192) < 2.2 * of(4096), "attention that is causal and nothing else has no array of [T, T]"


def test_a_window_keeps_no_scores_of_all_tokens_on_a_gpu(monkeypatch):
    monkeypatch.setenv(cards.VARIABLE, "a100")
    shape = partial(reduced, layers=1, vocabulary=67, batch=1, tokens=4096)
    windowed = case("mistral-7b-v0.1", "bfloat16", shape=shape, changes={"sliding_window": 16})
    record = predicted(windowed.model_copy(update={"place": Place("torch", "cuda")}))
    assert record.prediction.predicted_peak_bytes < 4 * 2 * 4096**2, "scores of 4 heads in 16 bits"


@pytest.mark.parametrize(("tokens", "called"), [(16, 3), (17, 0)])
def test_a_window_as_long_as_the_row_hides_nothing(tokens, called):
    calls = []
    parts = assemble(LOADED, case("mistral-7b-v0.1", changes={"sliding_window": 16}))
    inner = parts.attend
    watched = replace(parts, attend=lambda *args: calls.append(1) or inner(*args))
    ids = torch.randint(2, 67, (2, tokens))
    parts.grad(watched, parts.init(parts, None), ids, ids)
    assert len(calls) == called


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128}
"""What says nothing about positions and heads."""
BAD = [
    ({"config": "qwen3-8c"}, "no published configuration and no file 'qwen3-8c'; did you mean 'qwen3-8b'?"),
    ({"config": "Mistralai/mistral-7B-v0.3"}, "no file 'Mistralai/mistral-7B-v0.3'; did you mean 'mistral-7b'?"),
    ({"config": {"vocab_size": 5}}, "has no model_type"),
    ({"config": {**configs.read("gemma-2-2b"), "final_logit_softcapping": [3]}}, "softcapping of [3]: give a number"),
    ({"config": {**configs.read("gpt2"), "n_layer": None}}, "has no num_hidden_layers: add it, if it is a decoder"),
    ({"config": {**LLAMA, "num_attention_heads": 4}}, "no num_key_value_heads and not the heads that are usual"),
    ({"config": {**configs.read("llama-3.2-1b"), "num_key_value_heads": 7}}, "num_key_value_heads of 7: give a number"),
    ({"config": {**configs.read("llama-3.2-1b"), "head_dim": -64}}, "head_dim of -64: give a whole number from 1 to"),
    ({"config": {**configs.read("llama-3.2-1b"), "rope_theta": math.nan}}, "has a rope_theta of nan: give a number"),
    ({"config": {**configs.read("llama-3.2-1b"), "intermediate_size": 10**12}}, "intermediate_size of 1000000000000"),
    (
        {"config": {**configs.read("mistral-7b-v0.1"), "sliding_window": -3}},
        "sliding_window of -3: give a whole number",
    ),
    (
        {"config": {**configs.read("mixtral-8x7b"), "num_experts_per_tok": 20}},
        "has a num_experts_per_tok of 20 and a num_local_experts of 8: give at most as many as there are",
    ),
    ({"config": {**configs.read("mixtral-8x7b"), "num_local_experts": 0}}, "and a num_local_experts of 0"),
    ({"config": "nowhere/config.json"}, "there is no file 'nowhere/config.json': give the config.json of a model"),
    ({"config": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}}, "'mamba' has no attention heads"),
    ({"config": {**configs.read("gpt2"), "n_layer": -3}}, "n_layer of -3: give a whole number from 1 to 1000"),
    ({"config": {**configs.read("gpt2"), "n_layer": True}}, "n_layer of True"),
    ({"config": "gpt2", "tokens": 2048}, "2,048 tokens are more than the 1,024 positions of gpt2"),
    ({"config": "gpt2", "changes": {"n_embed": 8}}, "has no 'n_embed'; did you mean 'n_embd'?"),
    ({"config": "gpt2", "changes": {"n_embd": -8}}, "with its changes has a n_embd of -8: give a whole number"),
    ({"config": "mistral-7b-v0.1", "changes": {"sliding_window": -3}}, "sliding_window of -3: give a whole number"),
    (
        {"config": "mixtral-8x7b", "changes": {"num_experts_per_tok": 20}},
        "has a num_experts_per_tok of 20 and a num_local_experts of 8: give at most as many as there are",
    ),
    (
        {"config": "phi-2", "changes": {"hidden_size": 128, "num_attention_heads": 2}},
        "turns 25 numbers of a head, by its partial_rotary_factor of 0.4, and they are turned in pairs",
    ),
    ({"config": "llama-2-7b", "changes": {"num_key_value_heads": 5}}, "a num_key_value_heads of 5: give a number that"),
]


@pytest.mark.parametrize(("sizes", "sentence"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_refused_in_a_sentence(sizes, sentence):
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        Shape(**sizes)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("hidden_size_per_layer_input", "each of its layers has an input of its own"),
        ("num_kv_shared_layers", "some of its layers read keys and values of others"),
    ],
)
def test_layers_that_read_more_than_hidden_states_are_refused(key, reason):
    read = case(GEMMA_4 | {key: 16})
    record = tasks.run(Task(kind="predict", cases=(read,), run_id="", parent=0, folder=""), LOADED)
    sentence = f"the architecture 'gemma4_text' cannot be cut into layers: {reason} ({key})"
    assert sentence in record.missing["predicted_peak_bytes"]


def test_layers_that_differ_by_their_numbers_follow_the_number_of_layers():
    """As Gemma 4 is saved: with the numbers of layers, and what these have in place of the others' values."""
    rule = {key: value for key, value in GEMMA_4.items() if key != "global_head_dim"}
    own = {f"{at:02}": {"head_dim": 512, "num_key_value_heads": 2} for at in range(5, 30, 6)}
    whole = parameters(Shape(config=rule | {"per_layer_config": own}))
    assert whole == parameters(Shape(config=GEMMA_4))
    assert parameters(Shape(config=rule | {"per_layer_config": own}, layers=12)) == parameters(
        Shape(config=GEMMA_4, layers=12)
    )


def test_a_mixture_without_experts_is_none():
    assert not Shape(config="granite-4.0-h-micro").mixture
    assert Shape(config="granite-4.0-h-tiny").mixture


def test_layers_that_only_a_list_names_are_counted():
    values = {"model_type": "nemotron_h", "hidden_size": 64, "vocab_size": 61, "num_attention_heads": 4}
    kinds = ["linear_attention", "mlp", "full_attention"]
    assert Shape(config=values | {"max_position_embeddings": 64, "layers_block_type": kinds}, tokens=16).layers == 3


@pytest.mark.parametrize(
    ("kind", "hint"),
    [("llamma", "; did you mean 'llama'?"), ("my_model", ": see its model_type, or install a newer version")],
)
def test_an_unknown_architecture_is_refused_in_a_sentence(kind, hint):
    strange = case({**configs.read("smollm2-135m"), "model_type": kind})
    record = tasks.run(Task(kind="predict", cases=(strange,), run_id="", parent=0, folder=""), LOADED)
    assert f"knows no architecture '{kind}'{hint}" in record.missing["predicted_peak_bytes"]


def test_a_file_is_read_where_it_lies_and_its_values_go_into_the_case(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.read("pythia-70m") | {"torch_dtype": "float16"}))
    shape = Shape(config=str(tmp_path))
    assert shape.config == configs.read("pythia-70m")
    assert shape.layers == 6 and shape.vocabulary == 50304
    assert Shape(**shape.model_dump()) == shape


def test_reduced_shapes_keep_every_kind_of_layer():
    assert tiny(Shape(config="gemma-3-1b")).layers == 6
    assert probe(Shape(config="smollm2-135m")).layers == 3


def test_reduced_shapes_keep_what_was_changed():
    assert probe(Shape(config="mistral-7b-v0.1", changes={"sliding_window": None})).changes["sliding_window"] is None


BARE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
PERIODS = [
    ({"model_type": "llama"}, 1),
    ({"model_type": "deepseek_v3", "first_k_dense_replace": 3}, 4),
    ({"model_type": "smollm3"}, 4),
    ({"model_type": "gemma3_text"}, 6),
    ({"model_type": "smollm3", "layer_types": ["full_attention"] * 12, "no_rope_layers": [1, 1, 0] * 4}, 3),
    ({"model_type": "qwen3_next", "full_attention_interval": 4}, 4),
    ({"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"] * 6, "num_dense_layers": 2}, 4),
    ({"model_type": "jamba", "attn_layer_period": 8, "expert_layer_period": 2}, 8),
    ({"model_type": "exaone4", "sliding_window_pattern": "LLG"}, 3),
    ({"model_type": "minimax", "layer_types": ["linear_attention"] * 12}, 12),
]


@pytest.mark.parametrize(
    ("values", "layers"), PERIODS, ids=lambda value: value["model_type"] if isinstance(value, dict) else ""
)
def test_a_small_model_has_a_layer_of_every_kind(values, layers):
    assert resizing.period(BARE | values) == layers
    assert probe(Shape(config=BARE | values)).layers == max(layers, 3)


GLM = {"model_type": "glm4_moe", "first_k_dense_replace": 3, "n_routed_experts": 4, "n_shared_experts": 1}
PROVEN = {
    "dense layers first": (GLM | EXPERTS, 2),
    "layers without positions": ({"model_type": "smollm3", "pad_token_id": 1}, 2),
    "layers that compute with their place": (
        {
            "model_type": "minimax",
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention"] * 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
        },
        3,
    ),
    "a router that returns a tuple": ({"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2}, 1),
}


@pytest.mark.parametrize("case", PROVEN)
def test_the_cut_of_every_kind_of_layer_is_proven(case):
    values, kinds = PROVEN[case]
    model = cut(Shape(config=BARE | values))
    assert len(set(model.kinds)) == kinds
    assert set(model.kinds) <= set(model.anatomy.kinds)


def test_a_kind_of_layer_that_no_small_model_has_is_refused_in_a_sentence():
    values = BARE | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [5]}
    sentence = (
        "at 12 layers: a small model of 2 proves the cut and has none of the kind of layer 5; give at most 5 layers"
    )
    with pytest.raises(CutError, match=re.escape(sentence)):
        cut(Shape(config=values))
    assert len(cut(Shape(config=values, layers=5)).kinds) == 5


def test_a_parameter_without_a_part_in_the_loss_is_named():
    """As that of the indexer of DeepSeek-V3.2, which is trained by a loss of its own."""
    values = transformers.CONFIG_MAPPING["deepseek_v32"]().to_dict()
    with pytest.raises(CutError, match=r"its parameter model.layers.0.self_attn.indexer.\S+ has no part in the loss"):
        cut(Shape(config=values))


def test_what_transformers_refuses_is_read_to_its_end():
    values = BARE | {"model_type": "llama", "hidden_act": "swoosh"}
    with pytest.raises(CutError) as refusal:
        cut(Shape(config=values))
    assert "swoosh" in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_fails_in_parts_is_refused_in_a_sentence():
    with pytest.raises(CutError, match="'openai-gpt' cannot be cut into layers: in parts it fails with RuntimeError: "):
        cut(Shape(config=BARE | {"model_type": "openai-gpt"}))


def test_layers_whose_buffers_differ_are_of_different_kinds():
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    for layer, slope in zip(layers, (1.0, 2.0, 1.0), strict=True):
        layer.register_buffer("slope", torch.tensor(slope))
    assert kinds_of(layers) == ("layer", "layer_1", "layer")


@pytest.mark.parametrize("partial_rotary_factor", [1.0, 0.75])
def test_rotary_factors_of_a_long_context_fit_a_small_head(partial_rotary_factor):
    """As Phi-3-mini-128k (all of a head rotates) and Phi-4-mini (three quarters do) have them."""
    factors = [1.0 + at for at in range(int(16 * partial_rotary_factor))]
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    more = {"model_type": "phi3", "partial_rotary_factor": partial_rotary_factor, "rope_scaling": rope}
    values = BARE | more | {"original_max_position_embeddings": 32, "pad_token_id": None}
    small = probe(Shape(config=values))
    assert len(small.values()["rope_scaling"]["long_factor"]) == 8 * partial_rotary_factor
    assert parameters(small) < parameters(Shape(config=values))


@pytest.mark.parametrize("name", ["gpt2", "olmo-2-7b", "phi-3-mini"])
def test_every_special_token_of_a_small_model_is_within_its_vocabulary(name):
    values = probe(Shape(config=name)).values()
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    tokens = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert all(token is None or token < 67 for token in tokens)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_experts_have_a_reference_in_64_bits(name, tmp_path, monkeypatch):
    """What torch multiplies by the matrices of all experts at once it does in 32 bits at the most.

    That shows in the first of the seeds, and in few updates.
    """
    monkeypatch.setattr(numerics, "SEEDS", (0,))
    monkeypatch.setattr(numerics, "observer", partial(numerics.observer, updates=2))
    torch_ = backends.load("torch")
    for kind in ("reference", "numerics"):
        task = Task(kind=kind, cases=(case(name),), run_id="", parent=0, folder="", reference=str(tmp_path))
        record = numerics.measure(task, LOADED, torch_)
    assert record.numerics.verdict == "bit_exact" and (tmp_path / "reference-0.npz").exists()
