"""A model calls a function and receives its result: `python examples/tool_calls.py [MODEL]`."""

import json
import sys
from typing import Any

import anyio

import penstock
from penstock.demo import model_path

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
    """Returns fixed data; a real function would query a service."""
    return {"city": city, "celsius": 21, "sky": "clear"}


async def main(model: str) -> None:
    """`tool_choice="required"` forces a call, even by a model that was not trained for tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    # `tool_parser` is needed only if the chat template does not show the format of tool calls.
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
        # Pass `tools` again to allow further calls.
        answered = await engine.generate(messages, max_tokens=48, temperature=0)
        print(answered.content)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
