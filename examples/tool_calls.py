"""A model that calls a function and gets its answer: `python examples/tool_calls.py MODEL`."""

import json
import sys
from typing import Any

import anyio

import penstock

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def weather(city: str) -> dict[str, Any]:
    """What a real one would ask a service for."""
    return {"city": city, "celsius": 21, "sky": "clear"}


async def main(model: str) -> None:
    """`tool_choice="required"` makes even a model that was never taught to call something do so."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    # Where the chat template says how the model writes its calls, `tool_parser` need not be given.
    async with penstock.Engine(model, tool_parser="hermes") as engine:
        asked = await engine.generate(
            messages,
            max_tokens=120,
            temperature=0,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        messages.append({"role": "assistant", "content": asked.content, "tool_calls": asked.tool_calls})
        for call in asked.tool_calls:
            answer = weather(**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) -> {answer}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(answer)})
        # A model whose chat template shows tools may be given them again, and call once more.
        answered = await engine.generate(messages, max_tokens=48, temperature=0)
        print(answered.content)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
