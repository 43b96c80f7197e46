"""Damaged, hostile and unsupported `adapter_config.json` files are refused by name."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.adapters import make_tensors, write_adapter, write_adapter_files
from support.api.checkpoints import make_config
from support.api.engines import make_engine, resident_bytes
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = make_config("llama")
PROMPT = random_prompt(20)
FILE = "adapter_config.json"
MALFORMED_JSON = "JSON object: "
RANKS = "an integer from 1 to 65536 is expected"
ALPHAS = "a finite number of 32 bits is expected"

#: Changes of a valid configuration, and words of the error.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "LoHa": ({"peft_type": "LOHA"}, 'peft_type is "LOHA"; supported: "LORA"'),
    "IA3": ({"peft_type": "IA3"}, 'peft_type is "IA3"'),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, "peft_type"),
    "type in lower case": ({"peft_type": "lora"}, 'peft_type is "lora"'),
    "type that is a number": ({"peft_type": 1}, "peft_type is 1"),
    "DoRA": ({"use_dora": True}, "use_dora is true"),
    "all biases": ({"bias": "all"}, 'bias is "all"'),
    "biases of the modules": ({"bias": "lora_only"}, 'bias is "lora_only"'),
    "bias that is a flag": ({"bias": True}, "bias is true"),
    "biases of the updates": ({"lora_bias": True}, "lora_bias is true"),
    "PiSSA": ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
    "PiSSA with iterations": ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
    "OLoRA": ({"init_lora_weights": "olora"}, 'init_lora_weights is "olora"'),
    "LoftQ": ({"init_lora_weights": "loftq"}, 'init_lora_weights is "loftq"'),
    "CorDA": ({"init_lora_weights": "corda"}, 'init_lora_weights is "corda"'),
    "initialisation that is an object": ({"init_lora_weights": {}}, "init_lora_weights is {}"),
    "CorDA's settings": ({"corda_config": {"corda_method": "ipm"}}, "corda_config"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens is [1,2]"),
    "QALoRA": ({"use_qalora": True}, "use_qalora is true"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    "KaSA": ({"kasa_config": {"beta": 1}}, "kasa_config"),
    "Monteclora": ({"monteclora_config": {"n": 1}}, "monteclora_config"),
    "VeLoRA": ({"velora_config": {"n": 1}}, "velora_config"),
    "Arrow": ({"arrow_config": {"top_k": 2}}, "arrow_config"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, 'modules_to_save is ["lm_head"]'),
    "trainable tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
    "target parameters": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    "Megatron": ({"megatron_config": {"tp": 2}}, "megatron_config"),
    "rank 0": ({"r": 0}, f"r: 0; {RANKS}"),
    "negative rank": ({"r": -1}, f"r: -1; {RANKS}"),
    "rank of a thousand million": ({"r": 1_000_000_000}, f"r: 1000000000; {RANKS}"),
    "rank of 100 digits": ({"r": 10**100}, RANKS),
    "rank that is a text": ({"r": "8"}, f'r: "8"; {RANKS}'),
    "rank that is a float": ({"r": 8.0}, f"r: 8.0; {RANKS}"),
    "rank that is a flag": ({"r": True}, f"r: true; {RANKS}"),
    "alpha that is a text": ({"lora_alpha": "16"}, f'lora_alpha: "16"; {ALPHAS}'),
    "alpha beyond 32 bits": ({"lora_alpha": 1e39}, f"lora_alpha: 1e+39; {ALPHAS}"),
    "alpha that is a list": ({"lora_alpha": [8]}, f"lora_alpha: [8]; {ALPHAS}"),
    "scaling that is a text": ({"use_rslora": "yes"}, 'use_rslora: "yes"; true or false is expected'),
    "pattern with rank 0": ({"rank_pattern": {"q_proj": 0}}, f"rank_pattern.q_proj: 0; {RANKS}"),
    "pattern with a text": ({"alpha_pattern": {"q_proj": "8"}}, f'alpha_pattern.q_proj: "8"; {ALPHAS}'),
    "patterns in a list": ({"rank_pattern": ["q_proj"]}, "an object of patterns"),
    "look-ahead": ({"rank_pattern": {"(?=.*q)q_proj": 8}}, "regular expressions without look-around"),
    "back-reference": ({"rank_pattern": {r"(.)\1": 8}}, "regular expressions without look-around"),
    "damaged expression": ({"alpha_pattern": {"(": 8}}, "alpha_pattern.( is"),
    "expression of a million states": ({"rank_pattern": {"((a{1000}){1000}){1000}": 8}}, "rank_pattern.(("),
    "100,000 patterns": ({"alpha_pattern": {f"x{i}": 8 for i in range(100_000)}}, "more than 4096 patterns"),
    "other rank than the tensors": ({"r": 4}, "rank 8; the configuration has 4"),
    "pattern with another rank": ({"rank_pattern": {"up_proj": 4}}, "up_proj.lora_A.weight: rank 8; the"),
}

#: Whole files, and words of the error.
CONTENTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", MALFORMED_JSON + "EOF"),
    "truncated": (b'{"r": 8, "lora_al', MALFORMED_JSON + "EOF"),
    "list": (b"[]", MALFORMED_JSON + "invalid type: sequence"),
    "text": (b'"LORA"', MALFORMED_JSON + "invalid type: string"),
    "two objects": (b"{}{}", MALFORMED_JSON + "trailing characters"),
    "NaN": (b'{"lora_alpha": NaN}', f'lora_alpha: "NaN"; {ALPHAS}'),
    "infinity": (b'{"lora_alpha": Infinity}', f'lora_alpha: "Infinity"; {ALPHAS}'),
    "number out of range": (b'{"lora_alpha": 1e999}', MALFORMED_JSON + "number out of range"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, MALFORMED_JSON + "recursion limit"),
    "deep lists": (b'{"target_modules":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion limit"),
    "not UTF-8": (b'{"base_model_name_or_path": "\xff"}', MALFORMED_JSON),
    "UTF-16": ('{"r": 8}'.encode("utf-16"), MALFORMED_JSON),
    "too large": (b'{"r": 8}' + b" " * (4 << 20), "bytes; the limit is 4194304"),
    "unpaired surrogate": (b'{"base_model_name_or_path": "\\ud800"}', MALFORMED_JSON),
    "repeated rank, the last counts": (b'{"r": 8, "r": 4}', "rank 8; the configuration has 4"),
}

#: Changes that have no effect on the output.
INERT: dict[str, dict[str, Any]] = {
    "unknown flag": {"use_future_lora": True},
    "unknown number": {"future_scale": 0.5},
    "unknown number that is none": {"future_scale": float("nan")},
    "unknown text": {"future_kind": "x"},
    "unknown null": {"use_future_lora": None},
    "unknown false": {"use_future_lora": False},
    "unknown empty": {"future_list": [], "future_object": {}, "future_text": ""},
    "fields of training": {
        "lora_dropout": 0.1,
        "inference_mode": True,
        "peft_version": "9.0",
        "revision": "main",
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "fan_in_fan_out": True,
        "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
        "loftq_config": {},
        "eva_config": {"rho": 2.0},
        "ensure_weight_tying": True,
    },
    "selection of modules": {
        "target_modules": "(a+)+$",
        "exclude_modules": ["q_proj"],
        "layers_to_transform": [5],
        "layers_pattern": "blocks",
    },
    "listed module that is absent": {"target_modules": ["q_proj", "router"]},
    "initialisations that keep the base": {"init_lora_weights": "gaussian"},
    "null patterns": {"rank_pattern": None, "alpha_pattern": None},
    "expression with catastrophic backtracking": {
        "rank_pattern": {r"(([a-z])+.)+[A-Z]([a-z])+": 4, r"(.*)*x": 2},
        "alpha_pattern": {r"(\w+)*!": 1, "(a|a)*b": 2},
    },
    "4096 patterns": {"alpha_pattern": {f"x{index}": 1 for index in range(4096)}},
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_adapters=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def outputs(engine: penstock.Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of the base, and that of the adapter of `write_adapter` without changes."""
    plain = write_adapter(tmp_path_factory.mktemp("adapter"), CONFIG)
    engine.blocking.load_adapter("plain", plain)
    outputs = {"base": run(engine, None), "plain": run(engine, "plain")}
    engine.blocking.unload_adapter("plain")
    return outputs


def run(engine: penstock.Engine, adapter: str | None) -> Any:
    params = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=True)
    result = engine.blocking.generate(PROMPT, params, adapter=adapter)
    return result.token_ids, result.logprobs


def refusal(engine: penstock.Engine, folder: Path) -> str:
    """The message of the error of a load, which ends within seconds and names the file."""
    start = time.monotonic()
    with pytest.raises(penstock.AdapterLoadError) as caught:
        engine.blocking.load_adapter("damaged", folder)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert len(message) < 1000
    assert message.startswith(f'adapter "damaged" cannot be loaded: {folder}/adapter_')
    return message


def assert_serves(engine: penstock.Engine, outputs: dict[str, Any]) -> None:
    """Check that a refused adapter is not registered, and that the engine computes as before."""
    assert engine.adapters == {}
    assert run(engine, None) == outputs["base"]
    with pytest.raises(penstock.AdapterNotFoundError):
        run(engine, "damaged")


@pytest.mark.parametrize("case", CHANGES)
def test_field_is_refused_by_name(
    case: str, engine: penstock.Engine, outputs: dict[str, Any], tmp_path: Path
) -> None:
    changes, words = CHANGES[case]
    assert words in refusal(engine, write_adapter(tmp_path, CONFIG, **changes))
    assert_serves(engine, outputs)


@pytest.mark.parametrize("case", CONTENTS)
def test_damaged_file_is_refused(
    case: str, engine: penstock.Engine, outputs: dict[str, Any], tmp_path: Path
) -> None:
    contents, words = CONTENTS[case]
    folder = write_adapter(tmp_path, CONFIG)
    (folder / FILE).write_bytes(contents)
    assert words in refusal(engine, folder)
    assert_serves(engine, outputs)


@pytest.mark.parametrize("case", INERT)
def test_field_without_effect_is_accepted(
    case: str, engine: penstock.Engine, outputs: dict[str, Any], tmp_path: Path
) -> None:
    start = time.monotonic()
    engine.blocking.load_adapter("plain", write_adapter(tmp_path, CONFIG, **INERT[case]))
    assert time.monotonic() - start < 20
    assert run(engine, "plain") == outputs["plain"]
    engine.blocking.unload_adapter("plain")


@pytest.mark.parametrize("contents", [{}, {"r": None, "lora_alpha": None}], ids=["absent", "null"])
def test_rank_and_alpha_are_8_by_default(
    contents: dict[str, Any], engine: penstock.Engine, outputs: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_adapter_files(tmp_path, contents, make_tensors(CONFIG))
    engine.blocking.load_adapter("plain", folder)
    assert run(engine, "plain") == outputs["plain"]
    engine.blocking.unload_adapter("plain")


@pytest.mark.parametrize("alpha", [0, 0.0, -0.0])
def test_alpha_0_gives_the_base(
    alpha: float, engine: penstock.Engine, outputs: dict[str, Any], tmp_path: Path
) -> None:
    engine.blocking.load_adapter("zero", write_adapter(tmp_path, CONFIG, lora_alpha=alpha))
    assert run(engine, "zero") == outputs["base"]
    engine.blocking.unload_adapter("zero")


def test_update_without_finite_outputs_affects_its_requests_only(
    engine: penstock.Engine, outputs: dict[str, Any], tmp_path: Path
) -> None:
    engine.blocking.load_adapter("huge", write_adapter(tmp_path, CONFIG, lora_alpha=1e18))
    params = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=True)
    with engine.blocking.stream(PROMPT, params, adapter="huge") as other:
        assert run(engine, None) == outputs["base"]
        assert len(other.result().token_ids) == 4
    engine.blocking.unload_adapter("huge")
    assert run(engine, None) == outputs["base"]


@pytest.mark.parametrize(
    "fields",
    [{"lora_alpha": 3e38}, {"lora_alpha": -3e38}, {"alpha_pattern": {"up_proj": 3e38}, "use_rslora": True}],
    ids=["alpha", "negative", "pattern"],
)
@pytest.mark.parametrize("factor", [1, 0], ids=["", "zeros"])
def test_scale_beyond_finite_updates_is_refused(
    fields: dict[str, Any], factor: int, engine: penstock.Engine, tmp_path: Path
) -> None:
    tensors = make_tensors(CONFIG)
    for name in tensors:
        if ".lora_B." in name:
            tensors[name][1][...] *= factor
    folder = write_adapter_files(tmp_path, {"r": 8, **fields}, tensors)
    message = r"model\.layers\.0\.\S+ of the adapter is too large to compute with: its scale is \d\.\d+e3\d"
    with pytest.raises(penstock.AdapterLoadError, match=message):
        engine.blocking.load_adapter("damaged", folder)
    assert engine.adapters == {}


@pytest.mark.needs("proc")
def test_refused_adapters_keep_no_memory(engine: penstock.Engine, tmp_path: Path) -> None:
    """Each load packs 0.9 MB before the last tensor is refused."""
    tensors = make_tensors(CONFIG, rank=64)
    last = max(tensors)
    tensors[last][1][...] = float("nan")
    folder = write_adapter_files(tmp_path, {"r": 64}, tensors)

    def refuse(count: int) -> int:
        for _ in range(count):
            with pytest.raises(penstock.AdapterLoadError, match=last):
                engine.blocking.load_adapter("damaged", folder)
        return resident_bytes()

    before = refuse(5)
    assert refuse(50) - before < 16 << 20


@pytest.mark.needs("proc")
def test_patterns_have_bounded_memory(tiny_model: Path, tmp_path: Path) -> None:
    """4 kB of patterns, each of which compiles to 95 kB."""
    patterns = {rf"\w{{6}}|{index}": 8 for index in range(300)}
    folder = write_adapter(tmp_path, CONFIG, rank_pattern=patterns)
    code = f"""
import penstock
from pathlib import Path
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
with penstock.Engine({str(tiny_model)!r}, threads=1, max_adapters=1) as engine:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the current size
    before = peak()
    try:
        engine.blocking.load_adapter("patterns", {str(folder)!r})
    except penstock.AdapterLoadError:
        pass
    print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 12 << 10  # KiB
