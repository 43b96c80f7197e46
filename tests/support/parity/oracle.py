"""The oracle: transformers and torch in float32, from token ids to logits and outputs.

Its results are stored: see `support.parity.stored`. torch is imported on first use, and only where results
are computed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import json
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from support.parity.compare import Greedy, Logits
from support.parity.stored import Mode, fingerprint, store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Patch = Callable[[], contextlib.AbstractContextManager[None]]


class Oracle:
    """A model of transformers in float32, or its stored results."""

    def __init__(
        self, source: dict[str, Any], load: Callable[[], Any], patch: Patch = contextlib.nullcontext
    ) -> None:
        """Load the model if results are computed. `source` is a part of their keys."""
        self._source = source
        self._model = None if store().mode is Mode.STORED else load()
        self._patch = patch

    @property
    def model(self) -> Any:
        """The model, where results are computed."""
        assert self._model is not None, "this result is not stored"
        return self._model

    def recall(self, kind: str, compute: Callable[[], dict[str, Any]], **inputs: Any) -> dict[str, Any]:
        """A stored or computed result."""
        return store().recall(kind, {"source": self._source, **inputs}, compute)

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """The logits after each prefix of `token_ids`, in one forward pass."""
        return self._rows("logits", token_ids, self._forward)

    def embeddings(self, token_ids: Sequence[int]) -> Logits:
        """The rows of the embedding table."""

        def compute(ids: Sequence[int]) -> NDArray[np.float32]:
            torch = import_torch()
            with torch.inference_mode():
                rows: NDArray[np.float32] = self.model.get_input_embeddings()(torch.tensor(ids)).numpy()
            return rows

        return self._rows("embeddings", token_ids, compute)

    def greedy(self, prompt: Sequence[int], count: int, *, by_step: bool = False) -> Greedy:
        """The greedy output of `count` tokens.

        Its logits are those of one forward pass, or with `by_step` those of generation: the prompt in one
        pass, then token by token. They differ only if the rotation depends on the length of the sequence.
        """
        kind, inputs = "greedy", {"prompt": list(prompt), "count": count, "by_step": by_step}

        def verified(token_ids: list[int]) -> Greedy:
            if by_step:
                rows = np.stack(list(self._steps(prompt, token_ids, count)))
            else:
                rows = self._forward([*prompt, *token_ids[:-1]])[len(prompt) - 1 :]
            return Greedy.of_logits(token_ids, rows)

        def compute() -> dict[str, Any]:
            # One forward pass shows whether the stored tokens are still the best ones.
            found = store().find(kind, {"source": self._source, **inputs})
            output = verified(list(found["token_ids"])) if found else None
            if output is None or (store().mode is Mode.WRITE and output.gaps.min() < 0):
                output = verified(self._generate(prompt, count))
            return vars(output)

        return Greedy(**self.recall(kind, compute, **inputs))

    def find_greedy(
        self, make_prompt: Callable[[int], list[int]], count: int, *, by_step: bool = False
    ) -> tuple[list[int], Greedy]:
        """The prompt of the first seed with an output that rounding cannot change, and that output."""
        for seed in itertools.count():
            prompt = make_prompt(seed)
            found = self.greedy(prompt, count, by_step=by_step)
            if found.is_unambiguous:
                break
        return prompt, found

    def generate(self, prompt: Sequence[int], count: int, **options: Any) -> Greedy:
        """The output of `count` tokens of `generate` of transformers, without sampling.

        The logits are those after all processors.
        """

        def compute() -> dict[str, Any]:
            torch = import_torch()
            settings = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
            with torch.inference_mode():
                answer = self.model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    return_dict_in_generate=True,
                    output_scores=True,
                    do_sample=False,
                    **settings | options,
                )
            rows = torch.cat(answer.scores).numpy()
            return vars(Greedy.of_logits(answer.sequences[0, len(prompt) :].tolist(), rows))

        return Greedy(**self.recall("generate", compute, prompt=list(prompt), count=count, options=options))

    def beam_search(
        self, prompt: Sequence[int], *, ends: list[int], num_beams: int, num_results: int, **options: Any
    ) -> list[tuple[list[int], float]]:
        """The outputs of a beam search, best first, with their scores."""

        def compute() -> dict[str, Any]:
            torch = import_torch()
            padding = self.model.config.vocab_size - 1
            with torch.inference_mode():
                answer = self.model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=num_beams,
                    num_return_sequences=num_results,
                    eos_token_id=ends,
                    pad_token_id=padding,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_scores=True,
                    **options,
                )
            outputs = [row[len(prompt) :].tolist() for row in answer.sequences]
            return {
                "outputs": [[token for token in output if token != padding] for output in outputs],
                "scores": answer.sequences_scores.numpy(),
            }

        inputs = {"prompt": list(prompt), "ends": ends, "num_beams": num_beams, "num_results": num_results}
        found = self.recall("beam search", compute, **inputs, options=options)
        return list(zip(found["outputs"], found["scores"].tolist(), strict=True))

    def pooled(self, token_ids: Sequence[int], pooling: str) -> NDArray[np.float32]:
        """The mean of the last hidden states, or the last one."""

        def compute() -> dict[str, Any]:
            torch = import_torch()
            with torch.inference_mode():
                output = self.model(torch.tensor([token_ids]), output_hidden_states=True)
            rows = output.hidden_states[-1][0].numpy().astype(np.float64)
            vector = rows[-1] if pooling == "last" else rows.mean(axis=0)
            return {"vector": vector.astype(np.float32)}

        found = self.recall("pooled", compute, token_ids=list(token_ids), pooling=pooling)
        vector: NDArray[np.float32] = found["vector"]
        return vector

    def perplexity(self, token_ids: Sequence[int], width: int) -> float:
        """The mean loss of windows of `width` tokens that overlap by half, as LMDeploy weighs them."""

        def compute() -> dict[str, Any]:
            torch = import_torch()
            length, end, losses = len(token_ids), 0, []
            for begin in range(0, length, width // 2):
                num_new, end = min(begin + width, length) - end, min(begin + width, length)
                targets = torch.tensor([token_ids[begin:end]])
                targets[:, :-num_new] = -100
                with torch.inference_mode():
                    loss = self.model(torch.tensor([token_ids[begin:end]]), labels=targets).loss
                losses += [loss.item()] * (num_new - (begin == 0))
                if end == length:
                    break
            return {"mean": math.fsum(losses) / len(losses)}

        found = self.recall("perplexity", compute, token_ids=list(token_ids), width=width)
        return float(found["mean"])

    def _rows(
        self, kind: str, token_ids: Sequence[int], compute: Callable[[Sequence[int]], NDArray[np.float32]]
    ) -> Logits:
        """Values for each token; in a live run all of them."""
        if store().mode is Mode.STORED:
            found = self.recall(kind, dict, token_ids=list(token_ids))
            return Logits.of_result(found)
        values = Logits.all_of(compute(token_ids))
        self.recall(kind, values.result, token_ids=list(token_ids))
        return values

    def _forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        torch = import_torch()
        self._forget()
        with torch.inference_mode(), self._patch():
            logits: NDArray[np.float32] = self.model(torch.tensor([token_ids])).logits[0].numpy()
        return logits

    def _forget(self) -> None:
        """Let dynamic rotations forget the longest sequence, as a short one does."""
        torch = import_torch()
        with torch.inference_mode():
            self.model(torch.tensor([[0]]))

    def _generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Tokens, each the best one after its predecessors."""
        chosen: list[int] = []
        has_cache = self._patch is contextlib.nullcontext  # a patch does not know the length
        steps = self._steps(prompt, chosen, count)
        for _ in range(count):
            row = next(steps) if has_cache else self._forward([*prompt, *chosen])[-1]
            chosen.append(int(row.argmax()))
        return chosen

    def _steps(
        self, prompt: Sequence[int], output: Sequence[int], count: int
    ) -> Iterator[NDArray[np.float32]]:
        """The logits before each of `count` tokens of the output; a token is read after they are yielded."""
        torch = import_torch()
        from transformers import DynamicCache

        self._forget()
        cache, inputs = DynamicCache(config=self.model.config), list(prompt)
        for index in range(count):
            # The cache is the fourth parameter: its name depends on the version of transformers.
            with torch.inference_mode(), self._patch():
                answer = self.model(torch.tensor([inputs]), None, None, cache, use_cache=True)
            yield answer.logits[0, -1].numpy()
            inputs = [output[index]]


@functools.cache
def import_torch() -> Any:
    """Import torch, without the warnings of its import, and use all CPUs."""
    assert store().mode is not Mode.STORED, "a test that needs torch has the marker torch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch


def load_oracle(checkpoint: Path, **overrides: Any) -> Oracle:
    """A Hugging Face directory, with overrides of its configuration, or a GGUF file."""
    source = {"checkpoint": fingerprint(checkpoint), "overrides": overrides}
    return Oracle(source, functools.partial(load_model, checkpoint, **overrides))


def load_model(checkpoint: Path, **overrides: Any) -> Any:
    """Load a model with transformers."""
    torch = import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        if checkpoint.suffix == ".gguf":
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.float32
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **overrides)
    return model.eval()


def load_scaled(checkpoint: Path, family: str, trained_length: int) -> Oracle:
    """A model whose queries are scaled by the logarithm of their position, beyond the trained length."""

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        torch = import_torch()
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        rotate = module.apply_rotary_pos_emb

        def scaled(query: Any, *arguments: Any, **options: Any) -> Any:
            query, key = rotate(query, *arguments, **options)
            counts = torch.arange(1, query.shape[2] + 1, dtype=torch.float64)
            scale = (counts.log() / math.log(trained_length)).clamp(min=1.0).to(query.dtype)
            return query * scale[:, None], key

        vars(module)["apply_rotary_pos_emb"] = scaled
        try:
            yield
        finally:
            vars(module)["apply_rotary_pos_emb"] = rotate

    source = {"checkpoint": fingerprint(checkpoint), "scaled": [family, trained_length]}
    return Oracle(source, functools.partial(load_model, checkpoint), patch)


def load_rounded(checkpoint: Path, span: int) -> Oracle:
    """A model whose linear layers get inputs that are rounded to FP8, with a scale for each `span` values.

    A `span` of 0 stands for all of them.
    """

    def load() -> Any:
        torch = import_torch()
        model = load_model(checkpoint)

        def rounded(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            groups = inputs[0].unflatten(-1, (-1, span or inputs[0].shape[-1]))
            scales = groups.abs().amax(-1, keepdim=True) / 448
            numbers = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            return ((numbers * scales).flatten(-2),)

        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(rounded)
        return model

    return Oracle({"checkpoint": fingerprint(checkpoint), "rounded": span}, load)


class TokenizerOracle:
    """A tokenizer of transformers, or its stored results."""

    def __init__(self, checkpoint: Path, *, splits_digits: bool = False) -> None:
        """Load the tokenizer if results are computed."""
        self._source = {"checkpoint": fingerprint(checkpoint), "splits_digits": splits_digits}
        self._tokenizer = None if store().mode is Mode.STORED else _load_tokenizer(checkpoint, splits_digits)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        found: list[int] = self._recall("ids", text, lambda: self._ids(text))
        return found

    def digests(self, texts: list[str]) -> list[str]:
        """For each text the digest of its ids."""
        found: list[str] = self._recall(
            "digests of ids", texts, lambda: [digest_of(self._ids(text)) for text in texts]
        )
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        found: str = self._recall(
            "text", list(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens=True)
        )
        return found

    def render(self, conversation: list[dict[str, str]]) -> str:
        """The prompt of a conversation."""
        found: str = self._recall(
            "prompt", conversation, lambda: self._template(conversation, tokenize=False)
        )
        return found

    def prompt_ids(self, conversation: list[dict[str, str]]) -> list[int]:
        """The ids of the prompt of a conversation."""
        found: list[int] = self._recall(
            "prompt ids", conversation, lambda: self._template(conversation, return_dict=False)
        )
        return found

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, where results are computed."""
        assert self._tokenizer is not None, "this result is not stored"
        return self._tokenizer

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **options)

    def _recall(self, kind: str, given: Any, compute: Callable[[], Any]) -> Any:
        inputs = {"source": self._source, "given": given}
        return store().recall(kind, inputs, lambda: {"value": compute()})["value"]


def _load_tokenizer(checkpoint: Path, splits_digits: bool) -> Any:  # noqa: FBT001 - one caller
    import_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer

        if checkpoint.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.parent, gguf_file=checkpoint.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    if splits_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def digest_of(token_ids: Sequence[int]) -> str:
    """The digest of token ids."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]
