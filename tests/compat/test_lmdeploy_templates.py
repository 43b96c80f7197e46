"""LMDeploy's `ChatTemplateConfig`: the built-in templates, JSON files and registered classes."""

from __future__ import annotations

import itertools
import json
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from penstock.compat.lmdeploy.chat_templates import ABSENT, TEMPLATES
from penstock.compat.lmdeploy.errors import ArgumentError, UnsupportedError
from penstock.compat.lmdeploy.model import (
    MODELS,
    BaseChatTemplate,
    BaseModel,
    ChatTemplateConfig,
    best_template,
)
from penstock.compat.lmdeploy.tokenizer import Tokenizer
from support.api.checkpoints import make_config, write_checkpoint
from support.compat.lmdeploy import GREEDY, open_pipeline

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
]
INTERNLM = """\
<|System|>:You are an AI assistant whose name is InternLM (书生·浦语).
- InternLM (书生·浦语) is a conversational language model that is developed by Shanghai AI Laboratory \
(上海人工智能实验室). It is designed to be helpful, honest, and harmless.
- InternLM (书生·浦语) can understand and communicate fluently in the language chosen by the user such as \
English and 中文.

<|User|>:Hi
<|Bot|>:"""
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions."
)
LLAMA2 = """\
[INST] <<SYS>>
You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being \
safe. Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal \
content. Please ensure that your responses are socially unbiased and positive in nature.

If a question does not make any sense, or is not factually coherent, explain why instead of answering \
something not correct. If you don't know the answer to a question, please don't share false information.
<</SYS>>

Hi [/INST] """
ULTRA = (
    "User: A one-turn chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, very detailed, and polite answers to the user's questions.</s>\n"
    "User: Hi</s>\nAssistant: "
)
DEEPSEEK_VL = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the "
    "user provides, and assist the user with a variety of tasks using natural language.\n\n"
    "User: Hi\n\nAssistant:"
)
END = "<｜end▁of▁sentence｜>"
IM = {role: f"<|im_start|>{role}\n" for role in ("system", "user", "assistant")}
QWEN = f"{IM['system']}You are a helpful assistant.<|im_end|>\n{IM['user']}Hi<|im_end|>\n{IM['assistant']}"
CHATML_CHAT = (
    f"{IM['system']}Be brief.<|im_end|>\n{IM['user']}Hi<|im_end|>\n{IM['assistant']}Hello!<|im_end|>\n"
    f"{IM['user']}Bye<|im_end|>\n{IM['assistant']}"
)

#: The texts for "Hi", and for "Bye" as the continuation of a session.
PROMPTS = {
    ("base", "llama", "internlm-20b", "baichuan-7b", "puyu", "falcon"): ("Hi", "Bye"),
    ("internlm", "internlm-chat", "internlm-chat-7b", "internlm-chat-7b-8k", "internlm-chat-20b"): (
        INTERNLM,
        "<eoa>\n<|User|>:Bye\n<|Bot|>:",
    ),
    ("vicuna", "wizardlM", "wizardlm"): (
        f"{VICUNA} USER: Hi ASSISTANT:",
        "</s>USER: Bye ASSISTANT:",
    ),
    ("llava-v1",): (
        f"{VICUNA.replace('user and', 'human and').replace('user', 'human')} USER: Hi ASSISTANT:",
        "</s>USER: Bye ASSISTANT:",
    ),
    ("llama2",): (LLAMA2, "</s><s>[INST] Bye [/INST] "),
    ("codellama",): ("[INST] <<SYS>>\n\n<</SYS>>\n\nHi [/INST] ", "</s><s>[INST] Bye [/INST] "),
    ("cogvlm",): ("Question: Hi Answer:", "</s>\nQuestion: Bye Answer:"),
    ("chatglm", "chatglm2-6b"): (
        "[Round 1]\n\n问：Hi\n\n答：",
        "\n\n[Round 1]\n\n问：Bye\n\n答：",
    ),
    ("mistral", "mixtral"): ("[INST] Hi [/INST]", "</s>[INST] Bye [/INST]"),
    ("internvl-zh",): ("<human>: Hi <bot>:", "</s><human>: Bye <bot>:"),
    ("deepseek-vl",): (DEEPSEEK_VL, f"{END}User: Bye\n\nAssistant:"),
    ("deepseek-vl2",): (
        "<|User|>: Hi\n\n<|Assistant|>:",
        f"{END}<|User|>: Bye\n\n<|Assistant|>:",
    ),
    ("llava-chatml",): (
        f"{IM['system']}Answer the questions.<|im_end|>{IM['user']}Hi<|im_end|>{IM['assistant']}",
        f"<|im_end|>{IM['user']}Bye<|im_end|>{IM['assistant']}",
    ),
    ("qwen", "qwen-7b", "qwen-14b"): (QWEN, f"<|im_end|>\n{IM['user']}Bye<|im_end|>\n{IM['assistant']}"),
    ("yi",): (
        f"{IM['user']}Hi<|im_end|>\n{IM['assistant']}",
        f"<|im_end|>\n{IM['user']}Bye<|im_end|>\n{IM['assistant']}",
    ),
    ("baichuan2", "baichuan2-7b"): ("<reserved_106>Hi<reserved_107>", "<reserved_106>Bye<reserved_107>"),
    ("solar",): (
        "### System:\n\n\n### User:\nHi\n\n### Assistant:\n",
        "\n\n### User:\nBye\n\n### Assistant:\n",
    ),
    ("ultracm", "ultralm"): (ULTRA, "</s>\nUser: Bye</s>\nAssistant: "),
}
STOP_WORDS = {
    "internlm-chat-7b": ["<eoa>"],
    "vicuna": ["</s>"],
    "qwen-7b": ["<|im_end|>"],
    "yi": ["<|im_end|>", "<|endoftext|>"],
    "llama2": None,
}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer(demo_model)


def unused_name() -> str:
    return f"template-{uuid.uuid4().hex}"


@pytest.mark.parametrize("name", [*itertools.chain(*PROMPTS)])
def test_built_in_template_renders_a_prompt(name: str) -> None:
    start, continuation = next(texts for names, texts in PROMPTS.items() if name in names)
    template = ChatTemplateConfig(name).chat_template
    assert template.get_prompt("Hi") == template.messages2prompt("Hi") == start
    assert template.messages2prompt([{"role": "user", "content": "Hi"}]) == start
    assert template.messages2prompt("Bye", sequence_start=False) == continuation


def test_every_built_in_template_has_an_expected_text() -> None:
    assert set(TEMPLATES) == set(itertools.chain(*PROMPTS))
    assert set(TEMPLATES) <= set(MODELS.module_dict)


@pytest.mark.parametrize(("name", "words"), STOP_WORDS.items())
def test_built_in_template_has_its_stop_words(name: str, words: list[str] | None) -> None:
    assert ChatTemplateConfig(name).chat_template.stop_words == words


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen-7b", CHATML_CHAT),
        ("vicuna", "Be brief. USER: Hi ASSISTANT: Hello!</s>USER: Bye ASSISTANT:"),
        (
            "llama2",
            "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello!</s><s>[INST] Bye [/INST] ",
        ),
        (
            "internlm-chat",
            "<|System|>:Be brief.\n<|User|>:Hi\n<|Bot|>:Hello!<eoa>\n<|User|>:Bye\n<|Bot|>:",
        ),
    ],
)
def test_built_in_template_renders_a_chat(name: str, expected: str) -> None:
    assert ChatTemplateConfig(name).chat_template.messages2prompt(CHAT) == expected


def test_chatglm_template_numbers_the_rounds() -> None:
    text = ChatTemplateConfig("chatglm").chat_template.messages2prompt(CHAT[1:])
    assert text == "[Round 1]\n\n问：Hi\n\n答：Hello!\n\n[Round 2]\n\n问：Bye\n\n答："


@pytest.mark.parametrize("name", [*STOP_WORDS, "chatglm", "mistral", "solar", "ultralm", "cogvlm"])
def test_session_renders_the_same_text_as_the_whole_chat(name: str) -> None:
    template = ChatTemplateConfig(name).chat_template
    parts = [
        template.messages2prompt(CHAT[1:2]),
        "Hello!",
        template.messages2prompt(CHAT[3:], sequence_start=False),
    ]
    whole = template.messages2prompt(CHAT[1:])
    if name == "chatglm":
        whole = whole.replace("Round 2", "Round 1")
    if parts[0].endswith("ASSISTANT:"):
        parts.insert(1, " ")
    assert "".join(parts) == whole


@pytest.mark.parametrize("name", ["qwen-7b", "vicuna", "llama2", "base", "chatglm"])
def test_last_message_of_the_assistant_is_continued(name: str) -> None:
    text = ChatTemplateConfig(name).chat_template.messages2prompt(CHAT[1:3])
    assert text.endswith("Hello!")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"capability": "completion"}, "a <FILL> b"),
        ({"capability": "python"}, "a <FILL> b"),
        ({"capability": "infilling"}, "<PRE> a  <SUF> b <MID>"),
        ({"system": "S:", "eosys": "/", "meta_instruction": "M"}, "S:M/a <FILL> b [/INST] "),
        ({"user": "U:", "eoh": ".", "assistant": "A:"}, "[INST] <<SYS>>\n\n<</SYS>>\n\nU:a <FILL> b.A:"),
    ],
)
def test_fields_change_a_built_in_template(changes: dict[str, Any], expected: str) -> None:
    template = ChatTemplateConfig("codellama", **changes).chat_template
    assert template.get_prompt("a <FILL> b") == expected
    infills = changes.get("capability") == "infilling"
    assert template.stop_words == (["<EOT>"] if infills else None)


def test_infilling_without_its_mark_is_refused() -> None:
    template = ChatTemplateConfig("codellama", capability="infilling").chat_template
    with pytest.raises(ArgumentError, match="prompt is 'a'; it must be a text with <FILL>"):
        template.get_prompt("a")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "critic", "content": "No."}, "the role of a message is 'critic'"),
        ({"content": "No."}, "the role of a message is None"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "images are not supported yet"),
        ({"role": "user", "content": []}, "the content of a message"),
        ({"role": "user"}, "the content of a message"),
    ],
)
def test_invalid_message_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        ChatTemplateConfig("qwen").chat_template.messages2prompt([message])


def test_text_of_a_list_is_its_first_part() -> None:
    content = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "Bye"}]
    template = ChatTemplateConfig("mistral").chat_template
    assert template.messages2prompt([{"role": "user", "content": content}]) == "[INST] Hi [/INST]"


def test_configuration_survives_json(tmp_path: Path) -> None:
    config = ChatTemplateConfig(unused_name(), user="问：", eoh="\n", stop_words=["。"])
    text = config.to_json(tmp_path / "template.json")
    assert "问：" in text
    assert json.loads(text) == json.loads((tmp_path / "template.json").read_text(encoding="utf-8"))
    for source in (text, tmp_path / "template.json", str(tmp_path / "template.json")):
        assert ChatTemplateConfig.from_json(source) == config
    assert config.model_name in MODELS
    assert config.chat_template.get_prompt("Hi") == "问：Hi\n"


def test_json_without_a_name_has_a_new_one() -> None:
    first, second = (ChatTemplateConfig.from_json('{"user": "U:"}') for _ in range(2))
    assert first.model_name != second.model_name
    assert first.chat_template.get_prompt("Hi") == "U:Hi"
    del MODELS.module_dict[first.model_name], MODELS.module_dict[second.model_name]


@pytest.mark.parametrize("source", ["none.json", "{", "[1]", '{"model": "x"}', '{"users": "U:"}'])
def test_invalid_json_is_refused(source: str) -> None:
    with pytest.raises(ArgumentError):
        ChatTemplateConfig.from_json(source)


def test_template_of_a_model_is_found_by_its_path(tokenizer: Tokenizer, demo_model: Path) -> None:
    own = best_template(tokenizer).messages2prompt("Hi")
    kind = MODELS.get("hf")
    assert kind is not None
    assert kind(model_path=str(demo_model)).get_prompt("Hi") == own
    assert ChatTemplateConfig("hf", model_path=str(demo_model)).chat_template.messages2prompt("Hi") == own
    for make in (kind, lambda: ChatTemplateConfig("hf").chat_template):
        with pytest.raises(ArgumentError, match="model_path is None; it must be the path of a model"):
            make()


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_template_that_is_not_provided_is_refused_by_name(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"model_name is '{name}'; it must be 'hf'"):
        _ = ChatTemplateConfig.from_json(json.dumps({"model_name": name})).chat_template
    with pytest.raises(ArgumentError, match=f"model_name is '{name}'; it must be 'hf'"):
        MODELS.get(name)
    assert name not in MODELS


def test_registered_class_renders_prompts(tokenizer: Tokenizer) -> None:
    name = unused_name()

    @MODELS.register_module(name=name)
    class Custom(BaseChatTemplate):
        def __init__(self, user: str = "U:", stop_words: Any = ("end",), **kwargs: Any) -> None:
            super().__init__(user=user, stop_words=stop_words, **kwargs)

    template = best_template(tokenizer, config=ChatTemplateConfig(name, assistant="A:"))
    assert (template.messages2prompt("Hi"), template.stop_words) == ("U:HiA:", ("end",))
    with pytest.raises(KeyError, match=name):
        MODELS.register_module(name, module=Custom)
    MODELS.register_module(name, module=BaseModel, force=True)
    assert ChatTemplateConfig(name).chat_template.get_prompt("Hi") == "Hi"


def test_class_with_the_methods_of_another_version_is_used(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    decorated, without_start = unused_name(), unused_name()

    @MODELS.register_module(name=decorated)
    class Decorated(BaseModel):
        def decorate_prompt(self, prompt: str, sequence_start: bool = True) -> str:  # noqa: FBT001, FBT002
            return f"{sequence_start}:{prompt}"

    @MODELS.register_module(name=[without_start])
    class WithoutStart:
        def __init__(self, **_: Any) -> None:
            pass

        def get_prompt(self, prompt: str) -> str:
            return f"<{prompt}>"

        def messages2prompt(self, messages: Any, **_: Any) -> str:
            return self.get_prompt(messages if isinstance(messages, str) else messages[-1]["content"])

    template = best_template(tokenizer, model_name=decorated)
    assert template.messages2prompt("Hi", sequence_start=False) == "False:Hi"
    template = best_template(tokenizer, model_name=without_start)
    assert template.messages2prompt("Hi", sequence_start=True) == template.get_prompt("Hi") == "<Hi>"
    assert template.messages2prompt(CHAT) == "<Bye>"
    assert template.stop_words is None
    assert not caplog.records
    for _ in range(2):
        assert template.messages2prompt("Hi", sequence_start=False) == "<Hi>"
    (record,) = caplog.records
    assert "WithoutStart has no parameter sequence_start" in record.getMessage()


def test_template_that_drops_answers_cannot_continue_a_session(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", make_config("llama"))
    file = path / "tokenizer_config.json"
    last = "{{ messages[-1]['content'] if messages else '' }}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": last}))
    template = best_template(Tokenizer(path))
    assert template.get_prompt("Hi") == "Hi"
    with pytest.raises(UnsupportedError, match="sequence_start is False; it is not supported"):
        template.get_prompt("Hi", sequence_start=False)
    with open_pipeline(path) as pipe:
        session = pipe.chat("ab", gen_config=GREEDY)
        pipe.chat("cdef", session, GREEDY)
        assert (session.response.finish_reason, len(session.history)) == ("length", 2)
        assert session.response.input_token_len == len(pipe.tokenizer.encode("cdef"))


def test_name_that_is_not_registered_has_its_own_texts_only(caplog: pytest.LogCaptureFixture) -> None:
    assert ChatTemplateConfig("unknown", user="U:").chat_template.get_prompt("Hi") == "U:Hi"
    assert "'unknown' is not a registered chat template" in caplog.text


@pytest.mark.parametrize("model_name", [None, "my-deployment"])
def test_model_has_its_own_template(tokenizer: Tokenizer, model_name: str | None) -> None:
    template = best_template(tokenizer, model_name=model_name)
    assert template.messages2prompt(CHAT) == CHATML_CHAT
    assert template.get_prompt("Bye", sequence_start=False) == CHATML_CHAT.partition("Hello!")[2]
    assert template.messages2prompt(CHAT[:3]) == CHATML_CHAT.partition("Hello!")[0] + "Hello!"
    assert best_template(tokenizer, config=ChatTemplateConfig("hf")).get_prompt("Hi") == template.get_prompt(
        "Hi"
    )


def test_model_name_selects_a_built_in_template(tokenizer: Tokenizer) -> None:
    assert best_template(tokenizer, model_name="mistral").get_prompt("Hi") == "[INST] Hi [/INST]"
    config = ChatTemplateConfig("base")
    assert best_template(tokenizer, model_name="mistral", config=config).get_prompt("Hi") == "Hi"


@pytest.mark.parametrize(("name", "expected"), [("Llama-2-7b", LLAMA2), ("some-base-model", "Hi")])
def test_model_without_a_template_is_matched_by_its_name(
    tmp_path: Path, name: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path / name, make_config("llama"))
    (path / "tokenizer_config.json").unlink()
    assert best_template(Tokenizer(path), model_path=path).get_prompt("Hi") == expected
    assert "the model has no chat template of its own" in caplog.text
    with pytest.raises(ArgumentError, match="model_name is 'hf'"):
        best_template(Tokenizer(path), model_path=path, config=ChatTemplateConfig("hf"))


def test_own_template_of_a_model_has_no_other_texts(tokenizer: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match=r"^user is 'U:'; it must be None, without other fields"):
        best_template(tokenizer, config=ChatTemplateConfig("hf", user="U:"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_name", 3),
        ("model_name", None),
        ("capability", "foo"),
        ("meta_instruction", 5),
        ("eoa", ["a"]),
        ("stop_words", "abc"),
        ("stop_words", [""]),
    ],
)
def test_invalid_field_is_refused_by_the_constructor(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{field} is .*; it must be "):
        ChatTemplateConfig(**{"model_name": "base", field: value})


def test_name_of_no_template_is_logged(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    best_template(tokenizer, model_name="intern")
    assert "model_name 'intern' is not the name of a chat template" in caplog.text
