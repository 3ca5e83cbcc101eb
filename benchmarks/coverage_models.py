"""Whole language models of transformers, built small: do they compute the same once they are swapped?

Layers that are right one by one can still be called in a way that nobody thought of. So every model that
AutoModelForCausalLM knows is built with two layers or so and random weights, and run eagerly, then swapped: logits, the
gradient of every parameter, and what it generates with its cache. coverage.py runs this and writes the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported once the device is there
    import torch

# Sizes, and the names that configs give them. Where a config has none of a name, nothing is set.
SIZES = {
    name: size
    for size, names in {
        128: "vocab_size vocab_size_per_layer_input",
        96: ("intermediate_size ffn_dim ffn_hidden_size inner_dim hidden_dim decoder_ffn_dim encoder_ffn_dim d_inner"),
        64: ("hidden_size n_embd d_model dim embedding_size emb_dim projection_size max_position_embeddings"),
        48: "shared_expert_intermediate_size",
        32: "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size",
        16: (
            "head_dim attention_head_dim global_head_dim kv_channels v_head_dim swa_head_dim "
            "swa_v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim qk_head_dim "
            "q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size "
            "hidden_size_per_layer_input sliding_window"
        ),
        8: (
            "qk_rope_head_dim qk_nope_head_dim rotary_dim num_experts num_local_experts n_routed_experts "
            "mamba_n_heads mamba_num_heads"
        ),
        4: (
            "num_attention_heads n_head num_heads n_heads swa_num_attention_heads decoder_attention_heads "
            "encoder_attention_heads linear_num_value_heads index_topk"
        ),
        2: (
            "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers "
            "num_key_value_heads swa_num_key_value_heads num_global_key_value_heads linear_num_key_heads "
            "index_n_heads num_experts_per_tok moe_topk n_group mamba_expand attn_layer_period "
            "eos_token_id"
        ),
        1: (
            "topk_group n_shared_experts first_k_dense_replace num_dense_layers mamba_n_groups n_groups "
            "attn_layer_offset bos_token_id"
        ),
        0: "num_kv_shared_layers zero_expert_num pad_token_id",
    }.items()
    for name in names.split()
}
# even where the default is None, which follows other sizes
SET_IN_ANY_CASE = ("head_dim", "num_key_value_heads", "intermediate_size", "num_experts_per_tok", "pad_token_id")
# Where that does not make a model
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 4,
    },
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
LARGEST = 40_000_000  # parameters that a small model may have
# Largest distance from the fp64 result, relative to the largest value: as for single layers in fp32, sums in another order,
# of some hundred terms of 2^-24. Or twice eager's distance, where that is more: what is left of numbers that nearly cancel
# is as much rounding in eager, and F.gelu on A2 and A3 is the tanh form, whatever was asked for.
LOGITS, GRADIENTS = 1e-5, 2e-5


@dataclass
class ModelResult:
    """`status` is verified, wrong, or not built: then the sizes above do not fit, or eager does not run with them."""

    name: str
    status: str = "not built"
    reason: str = ""
    swapped: dict[str, int] = field(default_factory=dict)
    logits: tuple[float, float] = (0.0, 0.0)  # distance from the fp64 result: ours, eager's
    gradients: tuple[float, float] = (0.0, 0.0)
    graph: str = ""  # asked for: what torch.compile makes of a training step


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str) -> Any:
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    cls = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    config = small(cls.config_class)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device("meta"):
        parameters = sum(p.numel() for p in cls(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters: sizes that SIZES does not name")
    torch.manual_seed(0)
    model = cls(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


def small(config_class: type) -> Any:
    """A config in SIZES, with one layer of each type that the default has."""
    default = config_class().to_dict()
    sizes = {
        name: value
        for name, value in SIZES.items()
        if name in default and (default[name] is not None or name in SET_IN_ANY_CASE)
    }
    if "qk_rope_head_dim" in default:  # latent attention: head_dim is another name for it, and each head has a key
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    if "attn_layer_indices" in default:
        sizes["attn_layer_indices"] = [1]
    if default.get("layer_types"):
        kinds = list(dict.fromkeys(default["layer_types"]))
        sizes["num_hidden_layers"] = max(2, len(kinds))
        sizes["layer_types"] = (2 * kinds)[: sizes["num_hidden_layers"]]
    if default.get("mlp_layer_types"):
        kinds = list(dict.fromkeys(default["mlp_layer_types"]))
        sizes["mlp_layer_types"] = (kinds * sizes["num_hidden_layers"])[: sizes["num_hidden_layers"]]
    sizes |= {key: 0.0 for key, value in default.items() if "drop" in key and type(value) is float}
    return config_class(**{**sizes, **OWN.get(config_class.model_type, {})})


def check(name: str, npu, compiled: bool = False) -> ModelResult:
    """With `compiled`, a training step is compiled as one graph, too, if it is one without the swap."""
    import copy

    import torch

    result = ModelResult(name)
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    try:
        model = build(name)
        exact = run(copy.deepcopy(model).double(), ids)
        model, ids = model.to("npu"), ids.to("npu")
        eager = run(model, ids)
        one_graph = compiled and graph(model, ids)
    except Exception as error:
        result.reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
        return result
    try:
        npu.kernelize(model)
        result.swapped = dict(npu.report(model).swapped)
        fused = run(model, ids)
        fused_graph = compiled and graph(model, ids)
    except Exception as error:
        result.status, result.reason = "wrong", f"raised {type(error).__name__}: {str(error)[:200]}"
        return result
    finally:
        npu.restore(model)
    result.logits = tuple(max(map(distance, run.logits, exact.logits)) for run in (fused, eager))
    result.gradients = tuple(gradient_distance(run.gradients, exact.gradients) for run in (fused, eager))
    problems = []
    for what, (ours, theirs), bound in (("logits", result.logits, LOGITS), ("gradients", result.gradients, GRADIENTS)):
        if not ours <= max(bound, 2 * theirs):
            problems.append(f"{what} are {ours:.1e} off, eager's {theirs:.1e}")
    if fused.gradients.keys() != eager.gradients.keys():
        problems.append(f"gradients of other parameters: {sorted(fused.gradients.keys() ^ eager.gradients.keys())[:3]}")
    if fused.tokens != eager.tokens:
        problems.append("other tokens are generated")
    if compiled:
        if isinstance(fused_graph, Run):
            result.graph = "one" if isinstance(one_graph, Run) else "one, eager none"
            off = gradient_distance(fused_graph.gradients, exact.gradients)
            if not off <= max(GRADIENTS, 2 * result.gradients[1]):
                problems.append(f"compiled, gradients are {off:.1e} off, eager's {result.gradients[1]:.1e}")
        else:
            result.graph = f"none: {fused_graph}"
            if isinstance(one_graph, Run):
                problems.append(f"no graph: {fused_graph}")
    result.status, result.reason = ("wrong" if problems else "verified"), "; ".join(problems)
    return result


@dataclass
class Run:
    logits: tuple[torch.Tensor, ...]  # in training, in inference
    gradients: dict[str, torch.Tensor]  # of the mean square of the logits, by parameter
    tokens: list | None = None  # prompt and four more; None for a model that cannot generate


def run(model, ids) -> Run:
    import torch

    result = step(model, model.train(), ids)
    with torch.no_grad():
        result.logits += (model.eval()(input_ids=ids).logits.cpu(),)
    if model.can_generate():
        result.tokens = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    return result


def graph(model, ids) -> Run | str:
    """A compiled training step, or why it cannot be one graph."""
    import torch

    torch._dynamo.reset()
    try:
        return step(model, torch.compile(model.train(), backend="aot_eager", fullgraph=True), ids)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:100]}"
    finally:
        model.zero_grad()
        model.eval()


def step(model, forward, ids) -> Run:
    import torch

    torch.manual_seed(1)
    logits = forward(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Run((logits.detach().cpu(),), gradients)


def distance(a: torch.Tensor, exact: torch.Tensor, least: float = 1e-30) -> float:
    """Largest difference, relative to the largest value of `exact` or to `least` if that is more; inf for NaN."""
    a, exact = a.cpu().double(), exact.cpu().double()
    error = ((a - exact).abs().max() / exact.abs().max().clamp(min=least)).item()
    return error if error == error else float("inf")


def gradient_distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Relative to the largest of a parameter's gradients, but at least to a thousandth of the model's largest."""
    least = max(gradient.abs().max().item() for gradient in exact.values()) / 1000
    return max(distance(found[name], exact[name], least) for name in found.keys() & exact.keys())


def with_swaps(results: list[ModelResult]) -> list[ModelResult]:
    return [r for r in results if r.swapped or r.status == "wrong"]


def headline(results: list[ModelResult]) -> str:
    swapped = with_swaps(results)
    return f"Whole models: {sum(r.status == 'verified' for r in swapped)} of {len(swapped)} verified"


def page(results: list[ModelResult]) -> list[str]:
    swapped = with_swaps(results)
    lines = [
        f"## {headline(results)}",
        "",
        "Each language model that `AutoModelForCausalLM` knows, in small sizes with random weights: logits in inference and",
        "in training and the gradients of all parameters, in fp32, by how far they are from fp64 relative to the largest",
        "value, swapped and (eager); and the same four tokens generated.",
        "",
    ]
    if any(r.graph for r in swapped):
        one = [r for r in swapped if r.graph.startswith("one")]
        nor = ", ".join(r.name for r in swapped if r not in one)
        lines += [
            f"Compiled (`torch.compile`, backend aot_eager), a training step of {len(one)} of them is one graph with the same",
            f"gradients, {sum(r.graph != 'one' for r in one)} of which are not without the swap. The others are not, either: {nor}.",
            "",
        ]
    lines += ["| model | swapped | logits | gradients |", "| --- | --- | ---: | ---: |"]
    for r in swapped:
        layers = ", ".join(f"{count} {layer}" for layer, count in sorted(r.swapped.items()))
        note = "" if r.status == "verified" else f" **{r.status}: {r.reason}**"
        numbers = (f"{ours:.0e} ({theirs:.0e})" for ours, theirs in (r.logits, r.gradients))
        lines.append(f"| {r.name} | {layers}{note} | {' | '.join(numbers)} |")
    untouched = ", ".join(r.name for r in results if r.status == "verified" and not r.swapped)
    lines += ["", f"Nothing to swap, and nothing changed: {untouched}.", ""]
    lines += ["Not built, as these sizes do not fit or eager does not run with them:", ""]
    return lines + [f"- {r.name}: {r.reason}" for r in results if r.status == "not built"] + [""]
