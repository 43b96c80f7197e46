"""The engine's results for 200 requests are recorded in `tests/data/same-bits.json`.

They show whether a change of the engine keeps every token and every bit of the logprobs. A seed gives the
requests; the file has only results. `make same-bits` writes them for every instruction set of the CPU: once
where the sets agree, and beside them what differs in a set.

The results do not depend on threads or on arrival. They depend on the weights, which numpy draws and the C
library rounds: float32 weights are cut to few bits, and the file has a digest of each checkpoint, so that a
changed checkpoint is told from a changed engine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, write_checkpoint, write_typed_safetensors
from support.api.ggufs import TYPES, write_gguf
from support.api.quantised import METHODS, write_quantised
from support.parity.stored import header_of, key_of, read_safetensors
from support.paths import DATA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    #: By setting, the results of its requests in order: tokens, ends of the outputs, and the digest of all
    #: numbers, separated by spaces.
    Results = dict[str, list[str]]

FILE = DATA / "same-bits.json"
COMMAND = "run `make same-bits` and commit tests/data/same-bits.json"
SEED = 20
#: Outputs with more tokens are recorded by a digest.
MAX_TOKENS_IN_WORDS = 24
#: In ascending order of preference, as `PENSTOCK_ISA` spells them.
INSTRUCTION_SETS = (
    "portable",
    "avx2",
    "avx_vnni",
    "avx512",
    "avx512_vnni",
    "avx512_bf16",
    "amx",
    "neon",
    "neon_dotprod",
    "neon_i8mm",
)

# ---- checkpoints

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

CONFIGS = {
    "llama-float32": make_config("llama", num_attention_heads=6),
    "llama-bfloat16": make_config(
        "llama", dtype="bfloat16", tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama-float16": make_config("llama", dtype="float16", attention_bias=True),
    "mistral-float32": make_config("mistral", sliding_window=40),
    "mistral-bfloat16": make_config("mistral", dtype="bfloat16", sliding_window=90),
    "mistral-float16": make_config("mistral", dtype="float16"),
    "qwen2-float32": make_config("qwen2", max_position_embeddings=100, rope_parameters=DYNAMIC),
    "qwen2-bfloat16": make_config("qwen2", dtype="bfloat16", tie_word_embeddings=True),
    "qwen2-float16": make_config("qwen2", dtype="float16"),
    "qwen3-float32": make_config("qwen3"),
    "qwen3-bfloat16": make_config("qwen3", dtype="bfloat16", num_key_value_heads=1),
    "qwen3-float16": make_config("qwen3", dtype="float16", head_dim=80),
}
#: Methods of quantised files, whose model is a Llama.
QUANTISED = ("gptq-act-order", "awq", "w8a8", "fp8-square-blocks")
#: The architecture of the GGUF file of each type.
GGUFS = {
    "Q8_0": "llama",
    "Q4_0": "qwen2",
    "Q5_1": "qwen3",
    "Q2_K": "llama",
    "Q3_K": "qwen2",
    "Q4_K": "llama",
    "Q6_K": "qwen3",
    "IQ4_XS": "llama",
}
#: Rank and modules of the adapters of each model that has some.
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 8": {"rank": 8, "lora_alpha": 5},
    "rank 16": {"rank": 16, "use_rslora": True, "modules": ("q_proj", "v_proj", "down_proj")},
    "rank 3": {"rank": 3, "dtype": "bfloat16"},
}
ADAPTED = ("llama-float32", "qwen3-bfloat16")


def write_models(folder: Path) -> dict[str, Path]:
    """Write the checkpoints and adapters into `folder`; returns their paths. An adapter is MODEL/ADAPTER."""
    models: dict[str, Path] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        models[name] = write_checkpoint(folder / name, config, seed=seed)
    for seed, name in enumerate(QUANTISED, 100):
        write_quantised(folder / name, METHODS[name], seed=seed)
        models[name] = folder / name
    for model in ADAPTED:
        for seed, (name, options) in enumerate(ADAPTERS.items(), 200):
            path = folder / f"{model} {name}"
            models[f"{model}/{name}"] = write_adapter(path, CONFIGS[model], seed=seed, **options)
    for seed, (name, architecture) in enumerate(GGUFS.items(), 300):
        models[name] = folder / f"{name}.gguf"
        write_gguf(models[name], TYPES[name], architecture=architecture, seed=seed)
    for path in models.values():
        cut_weights(path)
    return models


def cut_weights(path: Path) -> None:
    """Round the float32 tensors of a model or adapter to 12 bits of mantissa.

    C libraries round the last bit of a few random numbers differently.
    """
    if path.suffix == ".gguf":
        import gguf

        for tensor in gguf.GGUFReader(path, "r+").tensors:
            if tensor.tensor_type == TYPES["F32"]:
                tensor.data[:] = cut(tensor.data)
        return
    for file in path.glob("*.safetensors"):
        kinds = {name: entry["dtype"] for name, entry in header_of(file).items()}
        tensors = {
            name: (kinds[name], cut(values) if kinds[name] == "F32" else values)
            for name, values in read_safetensors(file)
        }
        write_typed_safetensors(file, tensors)


def cut(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest values of 12 bits of mantissa."""
    bits = np.ascontiguousarray(values).view(np.uint32) + np.uint32(1 << 10)
    return (bits & np.uint32(0xFFFF_F800)).view(np.float32)


def digest_of_model(path: Path) -> str:
    """The digest of all values of a model or adapter, and of its configuration."""
    if path.is_dir():
        texts = [file for file in sorted(path.glob("*config.json")) if file.name != "tokenizer_config.json"]
        contents: Any = [json.loads(file.read_text()) for file in texts]
        tensors = {
            name: values for file in path.glob("*.safetensors") for name, values in read_safetensors(file)
        }
    else:
        import gguf

        reader = gguf.GGUFReader(path)
        skipped = ("GGUF.", "tokenizer.")
        fields = {name: value for name, value in reader.fields.items() if not name.startswith(skipped)}
        contents = {name: value.contents() for name, value in fields.items()}
        tensors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    return key_of("model", [contents, tensors])[:16]


# ---- requests


@dataclass(frozen=True)
class Setting:
    """An engine, and the sizes of the batches that it computes one after the other."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (3, 2)
    adapters: tuple[str, ...] = ()
    #: Kinds of the requests; without them, they are drawn.
    kinds: tuple[str, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether the KV cache has no room for the requests of a batch."""
        return "kv_cache_blocks" in self.options

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids of the prompts."""
        return 320 if self.model in GGUFS else 512


SMALL_CACHE = {"kv_cache_blocks": 13, "max_model_len": 190}
PREEMPTED = ("choices", "greedy", "choices", "top_p", "penalties")
DRAFTED = ("few_tokens", "greedy", "few_tokens", "choices", "few_tokens")
MIXED = {"type": "int4", "group_size": 32, "symmetric": False, "layers": {"*.down_proj": "int8"}}

SETTINGS = {
    **{name: Setting(name, {"max_num_batched_tokens": 32}) for name in list(CONFIGS)[::2]},
    **{name: Setting(name, {"block_size": 32}) for name in list(CONFIGS)[1::2]},
    "KV float16": Setting("llama-float32", {"kv_cache_dtype": "float16"}),
    "KV bfloat16": Setting("qwen3-float32", {"kv_cache_dtype": "bfloat16", "max_num_batched_tokens": 64}),
    "KV int8": Setting("mistral-bfloat16", {"kv_cache_dtype": "int8", "max_num_batched_tokens": 48}),
    "KV uint4": Setting("qwen2-float16", {"kv_cache_dtype": "uint4"}),
    "int8": Setting("llama-float16", {"quantization": "int8"}),
    "int4": Setting("mistral-float32", {"quantization": "int4", "max_num_batched_tokens": 64}),
    "w8a16": Setting("qwen2-bfloat16", {"quantization": "w8a16"}),
    "w4a16": Setting("qwen3-float16", {"quantization": "w4a16", "max_num_batched_tokens": 32}),
    "fp8": Setting("llama-bfloat16", {"quantization": "fp8"}),
    "int4 and int8": Setting("qwen3-float32", {"quantization": MIXED, "kv_cache_dtype": "int8"}),
    **{name: Setting(name) for name in QUANTISED},
    **{name: Setting(name, {"max_num_batched_tokens": 64}) for name in GGUFS},
    "drafts": Setting("llama-float32", {"speculation": "ngram", "num_speculative_tokens": 4}, kinds=DRAFTED),
    "drafts, KV int8": Setting(
        "qwen3-bfloat16", {"speculation": "ngram", "kv_cache_dtype": "int8"}, kinds=DRAFTED
    ),
    "adapters": Setting("llama-float32", {"max_adapters": 2, "max_cpu_adapters": 3}, adapters=(*ADAPTERS,)),
    "adapters, int8, drafts": Setting(
        "qwen3-bfloat16",
        {"max_adapters": 3, "quantization": "int8", "speculation": "ngram"},
        adapters=(*ADAPTERS,),
    ),
    "recomputed": Setting("llama-bfloat16", SMALL_CACHE, (5,), kinds=PREEMPTED),
    "swapped": Setting("qwen2-float32", SMALL_CACHE | {"preemption_mode": "swap"}, (5,), kinds=PREEMPTED),
}

LETTERS = [chr(letter) for letter in range(ord("!"), ord("~"), 2)]
#: Parameters of each kind of request, beside its length and seed. A prompt without any is scored or embedded.
KINDS: dict[str, dict[str, Any] | None] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "temperature": {"temperature": 0.3},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "top_k": {"temperature": 1.2, "top_k": 20},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "typical_p": {"temperature": 1.0, "typical_p": 0.7},
    "filters": {"temperature": 1.1, "top_n_sigma": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "penalties": {
        "temperature": 0.7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
    },
    "logit_bias": {"temperature": 0.8, "logit_bias": {5: 4.0, 6: 3.5, 7: -100.0, 300: 3.0}},
    "no_repeat_ngram": {"temperature": 0.0, "no_repeat_ngram_size": 2},
    "masks": {
        "temperature": 0.9,
        "allowed_token_ids": list(range(20, 120)),
        "bad_token_ids": list(range(30, 50)),
    },
    "few_tokens": {"temperature": 0.2, "allowed_token_ids": [9, 10, 11], "max_tokens": 40},
    "top_logprobs": {"temperature": 0.0, "top_logprobs": 5},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    "processed": {"temperature": 0.6, "logprobs_mode": "processed", "repetition_penalty": 1.2},
    "choices": {"n": 3, "temperature": 1.0, "top_p": 0.95},
    "best_of": {"n": 2, "best_of": 4, "temperature": 0.9},
    "beams": {"num_beams": 3},
    "stop": {"temperature": 1.0, "stop": LETTERS},
    "stop_token_ids": {"temperature": 1.0, "stop_token_ids": list(range(0, 320, 5)), "min_tokens": 3},
    "regex": {"temperature": 0.8, "regex": "(abc|abd){2}[0-9]{1,4}"},
    "logits": {"temperature": 0.0, "output_logits": "all", "output_hidden_states": "generation"},
    "score": None,
    "embedding": None,
}


class Request(NamedTuple):
    """A prompt and the parameters of its output; a prompt without any is scored or embedded."""

    kind: str
    prompt: list[int]
    params: dict[str, Any] | None
    adapter: str | None


@functools.cache
def write_requests() -> dict[str, list[list[Request]]]:
    """The batches of each setting. Prompts of the second batch begin as the longest one of the first does."""
    chance = random.Random(SEED)
    deck = list(KINDS) * 8
    chance.shuffle(deck)
    return {name: list(_batches_of(setting, chance, deck)) for name, setting in SETTINGS.items()}


def _batches_of(setting: Setting, chance: random.Random, deck: list[str]) -> Iterator[list[Request]]:
    kinds = iter(setting.kinds or [deck.pop() for _ in range(sum(setting.batches))])
    adapters = itertools.cycle([*setting.adapters, None])
    cached: list[list[int]] = []
    for size in setting.batches:
        batch = [_request_of(next(kinds), next(adapters), setting, chance, cached) for _ in range(size)]
        yield batch
        cached = [request.prompt for request in batch]


def _request_of(
    kind: str, adapter: str | None, setting: Setting, chance: random.Random, cached: list[list[int]]
) -> Request:
    def tokens(count: int) -> list[int]:
        return [chance.randrange(setting.vocabulary_size) for _ in range(count)]

    longest = max(cached, key=len, default=[])
    prompt = longest[: chance.randint(16, 200)] + tokens(chance.randint(2, 90 if setting.is_small else 160))
    if chance.random() < (0.8 if "speculation" in setting.options else 0.2):  # text that repeats itself
        prompt = (prompt[-12:] * 12)[: chance.randint(20, 100)]
    if setting.is_small:
        prompt = (prompt * 90)[: chance.randint(70, 90)]
    params = KINDS[kind]
    if params is not None:
        params = {"max_tokens": 60 if setting.is_small else chance.randint(6, 18)} | params
        if kind != "beams":
            params |= {"logprobs": True, "seed": chance.randrange(2**32)}
        if kind != "regex":
            params["ignore_eos"] = True
    return Request(kind, prompt, params, adapter)


def count_kinds() -> dict[str, int]:
    """The number of requests of each kind."""
    batches = (batch for found in write_requests().values() for batch in found)
    return dict(Counter(request.kind for batch in batches for request in batch))


# ---- results

#: Sums of the statistics of engines.
Reached = Counter[str]
STATISTICS = (
    "prefix_hit_tokens",
    "accepted_tokens",
    "preemptions",
    "swaps",
    "recomputed_tokens",
    "adapter_evictions",
)


def compute(name: str, models: Mapping[str, Path], reached: Reached | None = None) -> tuple[str, list[str]]:
    """The instruction set of a setting's engine, and the results of its requests.

    What the engine has done is added to `reached`.
    """
    setting = SETTINGS[name]
    # PENSTOCK_THREADS applies if it is set; small models are fastest with one thread.
    threads = None if "PENSTOCK_THREADS" in os.environ else 1
    options = {"max_model_len": 400, "max_num_seqs": 8} | dict(setting.options)
    with penstock.Engine(str(models[setting.model]), device="cpu", threads=threads, **options) as engine:
        for adapter in setting.adapters:
            engine.blocking.load_adapter(adapter, models[f"{setting.model}/{adapter}"])
        entries = [entry for batch in write_requests()[name] for entry in _compute_batch(engine, batch)]
        if reached is not None:
            stats = engine.stats()
            reached.update({field: getattr(stats, field) for field in STATISTICS})
        return engine.info.isa, entries


def _compute_batch(engine: penstock.Engine, batch: Sequence[Request]) -> Iterator[str]:
    outputs = [request for request in batch if request.params is not None]
    params = [penstock.SamplingParams(adapter=each.adapter, **each.params or {}) for each in outputs]
    prompts = [each.prompt for each in outputs]
    results = iter(engine.blocking.generate_many(prompts, params, concurrency=len(batch)))
    for request in batch:
        if request.kind == "score":
            yield digest(engine.blocking.score(request.prompt, adapter=request.adapter).logprobs)
        elif request.kind == "embedding":
            embeddings = engine.blocking.embed([request.prompt], adapter=request.adapter)
            yield digest(embeddings.tensor)
        else:
            item = next(results)
            if item.result is None:
                raise AssertionError(f"{request.kind}: {item.error}")
            yield entry_of(item.result)


def entry_of(result: penstock.Result) -> str:
    """The tokens of all choices and their ends, and the digest of all numbers."""
    ends = ", ".join(choice.finish_reason for choice in result.choices)
    ids = [list(choice.token_ids) for choice in result.choices]
    is_long = sum(map(len, ids)) > MAX_TOKENS_IN_WORDS
    words = f"#{digest(ids)}" if is_long else "; ".join(" ".join(map(str, found)) for found in ids)
    numbers = [
        [each.logprobs, each.top_logprobs, each.score, each.logits, each.hidden_states]
        for each in result.choices
    ]
    return f"{words} {ends} {digest([result.prompt_logprobs, result.prompt_top_logprobs, numbers])}"


def digest(value: Any) -> str:
    """A digest of the bits of numbers in nested sequences; floats as float64, tensors as their bytes."""
    found = hashlib.sha256()
    _add(value, found.update)
    return found.hexdigest()[:16]


def _add(value: Any, update: Callable[[bytes], None]) -> None:
    if value is None:
        update(b"none")
    elif isinstance(value, int):
        update(struct.pack("<q", value))
    elif isinstance(value, float):
        update(struct.pack("<d", value))
    elif isinstance(value, list | tuple):
        update(struct.pack("<q", len(value)))
        for each in value:
            _add(each, update)
    else:
        array = np.asarray(value)
        assert array.dtype == np.float32
        update(repr(array.shape).encode() + array.tobytes())


def compute_all(models: Mapping[str, Path]) -> tuple[str, Results]:
    """The instruction set of this process, and the results of all requests."""
    found = {name: compute(name, models) for name in SETTINGS}
    (isa,) = {isa for isa, _ in found.values()}
    return isa, {name: entries for name, (_, entries) in found.items()}


def compute_in_process(isa: str, folder: Path) -> Results:
    """The results of an instruction set, in a process of its own; `folder` is that of `write_models`."""
    done = subprocess.run(
        [sys.executable, "-m", "support.api.recorded_bits", str(folder)],
        env=os.environ | {"PENSTOCK_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found, results = json.loads(done.stdout)
    assert found == isa
    return results  # type: ignore[no-any-return]


def available_sets(model: Path) -> list[str]:
    """The instruction sets of this CPU, which the refusal of another one names."""
    with mock.patch.dict(os.environ, PENSTOCK_ISA="?"):
        try:
            penstock.Engine(str(model), device="cpu").blocking.start()
        except penstock.ConfigError as error:
            words = str(error.limit).replace(":", " ").split()
            return [name for name in INSTRUCTION_SETS if name in words]
    raise AssertionError("an unknown instruction set is accepted")


# ---- the file


def tokens_of(entry: str) -> str:
    """The entry of a result without the digest of its numbers."""
    return entry.rpartition(" ")[0]


class Record:
    """The content of the file."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.made_by: dict[str, str] = content["made_by"]
        self.models: dict[str, str] = content["models"]
        self._common: Results = content["results"]
        self._others: dict[str, dict[str, dict[str, str]]] = content["instruction_sets"]

    @classmethod
    def read(cls) -> Record:
        """The record of the file."""
        return cls(json.loads(FILE.read_text()))

    @property
    def instruction_sets(self) -> list[str]:
        """The instruction sets that have results."""
        return list(self._others)

    def results(self, isa: str) -> Results:
        """The results of an instruction set."""
        return {
            name: [
                self._others[isa].get(name, {}).get(str(index), entry) for index, entry in enumerate(entries)
            ]
            for name, entries in self._common.items()
        }

    def differences(self, isa: str, name: str, found: Sequence[str]) -> list[str]:
        """Messages about the results of a setting that are not the recorded ones."""
        requests = [request for batch in write_requests()[name] for request in batch]
        recorded = self.results(isa).get(name, [])
        if len(recorded) != len(found):
            return [f"{name}: {len(recorded)} results are recorded: {COMMAND}"]
        return [
            f"{name}, request {index} ({request.kind}): "
            + ("other numbers, the same tokens" if tokens_of(old) == tokens_of(new) else "other tokens")
            + f": {new} instead of {old}"
            for index, (request, old, new) in enumerate(zip(requests, recorded, found, strict=True))
            if old != new
        ]


def made_by() -> dict[str, str]:
    """The digests of this module and of the requests that it writes."""
    text = json.dumps([[name, SETTINGS[name].options, batches] for name, batches in write_requests().items()])
    contents = {"script": Path(__file__).read_bytes(), "requests": text.encode()}
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}


def write_file(found: Mapping[str, Results], models: Mapping[str, str]) -> None:
    """Write the results of instruction sets: those that most sets have, and beside them the others."""
    common: Results = {}
    others: dict[str, dict[str, dict[str, str]]] = {isa: {} for isa in INSTRUCTION_SETS if isa in found}
    for name in SETTINGS:
        common[name] = []
        for index, entries in enumerate(zip(*(results[name] for results in found.values()), strict=True)):
            common[name].append(Counter(entries).most_common(1)[0][0])
            for isa, entry in zip(found, entries, strict=True):
                if entry != common[name][-1]:
                    others[isa].setdefault(name, {})[str(index)] = entry
    content = {"made_by": made_by(), "models": models, "results": common, "instruction_sets": others}
    FILE.write_text(json.dumps(content, indent=1) + "\n")


def renew() -> None:
    """Write the file: the results of all sets of this CPU, and those of other sets that still hold."""
    with tempfile.TemporaryDirectory() as name:
        paths = write_models(Path(name))
        models = {model: digest_of_model(path) for model, path in paths.items()}
        sets = available_sets(paths["llama-float32"])
        found = {isa: compute_in_process(isa, Path(name)) for isa in sets}
    if FILE.exists():
        old = Record.read()
        changed = {isa: _count(old.results(isa), found[isa]) for isa in found if isa in old.instruction_sets}
        for isa, count in changed.items():
            print(f"{isa}: {count} of {sum(map(len, found[isa].values()))} results have changed")
        is_same = (old.made_by, old.models) == (made_by(), models) and not any(changed.values())
        for isa in old.instruction_sets:
            if isa not in found and is_same:
                found[isa] = old.results(isa)
            elif isa not in found:
                print(f"{isa}: removed; write its results on a CPU that has it")
    write_file(found, models)
    print(f"{', '.join(found)}: {FILE.stat().st_size} bytes")


def _count(old: Results, new: Results) -> int:
    """The number of new results that the old ones do not have."""
    return sum(
        index >= len(old.get(name, [])) or old[name][index] != entry
        for name, entries in new.items()
        for index, entry in enumerate(entries)
    )


def main(arguments: Sequence[str]) -> None:
    """Write the file; with the folder of `write_models`, print the results of this process instead."""
    if arguments:
        json.dump(compute_all(paths_of(Path(arguments[0]))), sys.stdout)
    else:
        renew()


def paths_of(folder: Path) -> dict[str, Path]:
    """The paths of the models that `write_models` has written into `folder`."""
    paths = {name: folder / name for name in (*CONFIGS, *QUANTISED)}
    paths |= {f"{model}/{name}": folder / f"{model} {name}" for model in ADAPTED for name in ADAPTERS}
    return paths | {name: folder / f"{name}.gguf" for name in GGUFS}


if __name__ == "__main__":
    main(sys.argv[1:])
