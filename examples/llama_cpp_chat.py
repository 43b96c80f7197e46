"""llama-cpp-python's API, a chat and a GBNF grammar: `python examples/llama_cpp_chat.py [MODEL]`."""

import sys

from penstock.compat.llama_cpp import Llama, LlamaGrammar
from penstock.demo import model_path

ANSWERS = LlamaGrammar.from_string(r"""
root   ::= answer ", because " reason "."
answer ::= "Yes" | "No"
reason ::= [a-zA-Z ]{3,60}
""")


def main(model: str) -> None:
    """Stream an answer, and print one that follows the grammar."""
    messages = [{"role": "user", "content": "Is the sky blue?"}]
    with Llama(model, n_ctx=1024, verbose=False) as llm:
        for chunk in llm.create_chat_completion(messages, max_tokens=48, stream=True):
            print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
        print()
        response = llm.create_chat_completion(messages, grammar=ANSWERS, max_tokens=64)
        print(response["choices"][0]["message"]["content"], response["usage"])


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
