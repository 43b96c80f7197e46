"""LMDeploy's sessions, two conversations at once: `python examples/lmdeploy_sessions.py [MODEL]`."""

import asyncio
import sys

from penstock.compat.lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from penstock.demo import model_path

GEN_CONFIG = GenerationConfig(max_new_tokens=24, top_k=1)


async def ask(pipe: Pipeline, session_id: int, question: str, *, is_first: bool) -> str:
    """One turn of a session, which remains open."""
    answer = ""
    async for item in pipe.generate(
        question, session_id, GEN_CONFIG, sequence_start=is_first, sequence_end=False
    ):
        answer += item.response
        if item.finish_reason == "error":
            return f"error: {item.error_message}"
    return answer


async def converse(pipe: Pipeline, session_id: int, questions: list[str]) -> None:
    """A conversation, which is forgotten at its end."""
    for number, question in enumerate(questions):
        answer = await ask(pipe, session_id, question, is_first=number == 0)
        print(f"{session_id}: {question}\n{session_id}: {answer}")
    pipe.end_session(session_id)


async def main(model: str) -> None:
    """The turns of both conversations are computed together."""
    with Pipeline(model, backend_config=TurbomindEngineConfig(session_len=1024)) as pipe:
        await asyncio.gather(
            converse(pipe, 1, ["My name is Bob.", "What is my name?"]),
            converse(pipe, 2, ["Name a river.", "Where does it begin?"]),
        )
        print(pipe.chat("Say hello.", gen_config=GEN_CONFIG))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else str(model_path())))
