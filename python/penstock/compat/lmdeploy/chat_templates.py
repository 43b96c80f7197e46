"""The texts of the built-in chat templates, by name: the fields of `ChatTemplateConfig` that they set."""

from __future__ import annotations

from typing import Any

__all__ = ["ABSENT", "TEMPLATES"]

_INTERNLM = {
    "system": "<|System|>:",
    "meta_instruction": (
        "You are an AI assistant whose name is InternLM (书生·浦语).\n"
        "- InternLM (书生·浦语) is a conversational language model that is developed by Shanghai AI "
        "Laboratory (上海人工智能实验室). It is designed to be helpful, honest, and harmless.\n"
        "- InternLM (书生·浦语) can understand and communicate fluently in the language chosen by the user "
        "such as English and 中文.\n"
    ),
    "eosys": "\n",
    "user": "<|User|>:",
    "eoh": "\n",
    "assistant": "<|Bot|>:",
    "eoa": "<eoa>\n",
    "stop_words": ["<eoa>"],
}
_CHATML = {
    "system": "<|im_start|>system\n",
    "eosys": "<|im_end|>\n",
    "user": "<|im_start|>user\n",
    "eoh": "<|im_end|>\n",
    "assistant": "<|im_start|>assistant\n",
    "eoa": "<|im_end|>\n",
}
_QWEN = {**_CHATML, "meta_instruction": "You are a helpful assistant.", "stop_words": ["<|im_end|>"]}
_VICUNA = {
    "meta_instruction": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions."
    ),
    "eosys": " ",
    "user": "USER: ",
    "eoh": " ",
    "assistant": "ASSISTANT: ",
    "eoa": "</s>",
    "stop_words": ["</s>"],
}
_LLAMA2 = {
    "system": "[INST] <<SYS>>\n",
    "meta_instruction": (
        "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while "
        "being safe. Your answers should not include any harmful, unethical, racist, sexist, toxic, "
        "dangerous, or illegal content. Please ensure that your responses are socially unbiased and positive "
        "in nature.\n\nIf a question does not make any sense, or is not factually coherent, explain why "
        "instead of answering something not correct. If you don't know the answer to a question, please "
        "don't share false information."
    ),
    "eosys": "\n<</SYS>>\n\n",
    "assistant": " [/INST] ",
    "eoa": "</s>",
    "separator": "<s>[INST] ",
}
_MISTRAL = {"user": "[INST] ", "eoh": " [/INST]", "eoa": "</s>"}
_ULTRA = {
    "meta_instruction": (
        "User: A one-turn chat between a curious user and an artificial intelligence assistant. The "
        "assistant gives helpful, very detailed, and polite answers to the user's questions.</s>"
    ),
    "eosys": "\n",
    "user": "User: ",
    "eoh": "</s>\n",
    "assistant": "Assistant: ",
    "eoa": "</s>\n",
}
_BAICHUAN2 = {"user": "<reserved_106>", "assistant": "<reserved_107>"}
_CHATGLM = {"user": "问：", "eoh": "\n\n", "assistant": "答：", "eoa": "\n\n"}  # noqa: RUF001

TEMPLATES: dict[str, dict[str, Any]] = {
    "base": {},
    "llama": {},
    "internlm": _INTERNLM,
    "baichuan-7b": {},
    "puyu": {},
    "internlm-20b": {"capability": "completion"},
    "internlm-chat": _INTERNLM,
    "internlm-chat-7b": _INTERNLM,
    "internlm-chat-7b-8k": _INTERNLM,
    "internlm-chat-20b": _INTERNLM,
    "cogvlm": {
        "user": "Question: ",
        "eoh": " ",
        "assistant": "Answer:",
        "eoa": "</s>",
        "separator": "\n",
        "stop_words": ["</s>"],
    },
    "vicuna": _VICUNA,
    "wizardlM": _VICUNA,
    "wizardlm": _VICUNA,
    "llava-v1": {
        **_VICUNA,
        "meta_instruction": (
            "A chat between a curious human and an artificial intelligence assistant. The assistant gives "
            "helpful, detailed, and polite answers to the human's questions."
        ),
    },
    "llama2": _LLAMA2,
    "codellama": {**_LLAMA2, "meta_instruction": ""},
    "chatglm": _CHATGLM,
    "chatglm2-6b": _CHATGLM,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "internvl-zh": {"user": "<human>: ", "eoh": " ", "assistant": "<bot>: ", "eoa": "</s>"},
    "deepseek-vl": {
        "meta_instruction": (
            "You are a helpful language and vision assistant. You are able to understand the visual content "
            "that the user provides, and assist the user with a variety of tasks using natural language."
        ),
        "eosys": "\n\n",
        "user": "User: ",
        "eoh": "\n\n",
        "assistant": "Assistant: ",
        "eoa": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    },
    "deepseek-vl2": {
        "user": "<|User|>: ",
        "eoh": "\n\n",
        "assistant": "<|Assistant|>: ",
        "eoa": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    },
    "llava-chatml": {
        "system": "<|im_start|>system\n",
        "meta_instruction": "Answer the questions.",
        "eosys": "<|im_end|>",
        "user": "<|im_start|>user\n",
        "eoh": "<|im_end|>",
        "assistant": "<|im_start|>assistant\n",
        "eoa": "<|im_end|>",
    },
    "qwen": _QWEN,
    "qwen-7b": _QWEN,
    "qwen-14b": _QWEN,
    "yi": {**_CHATML, "meta_instruction": None, "stop_words": ["<|im_end|>", "<|endoftext|>"]},
    "baichuan2": _BAICHUAN2,
    "baichuan2-7b": _BAICHUAN2,
    "falcon": {},
    "solar": {
        "system": "### System:\n",
        "eosys": "\n\n",
        "user": "### User:\n",
        "eoh": "\n\n",
        "assistant": "### Assistant:\n",
        "eoa": "\n\n",
    },
    "ultracm": _ULTRA,
    "ultralm": _ULTRA,
}

#: Templates of LMDeploy for models that have a chat template of their own.
ABSENT = frozenset(
    {
        "chatglm3",
        "codegeex4",
        "cogvlm2",
        "deepseek",
        "deepseek-coder",
        "deepseek-r1",
        "deepseek-v3",
        "gemma",
        "glm4",
        "intern-s1",
        "internlm-xcomposer2",
        "internlm-xcomposer2d5",
        "internlm2",
        "internlm3",
        "interns1",
        "internvl-internlm2",
        "internvl-phi3",
        "internvl-zh-hermes2",
        "internvl2-internlm2",
        "internvl2-phi3",
        "internvl2_5",
        "llama3",
        "llama3_1",
        "llama3_2",
        "llama4",
        "minicpm3",
        "minicpmv-2d6",
        "molmo",
        "phi-3",
        "phi-4",
        "qwen2d5",
        "qwen2d5-vl",
        "qwen3",
        "qwq",
        "qwq_preview",
        "yi-vl",
    }
)
