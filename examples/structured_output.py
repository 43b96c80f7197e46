"""Structured output: `python examples/structured_output.py [MODEL]`. The output is always valid."""

import json
import sys

import anyio

import penstock
from penstock.demo import model_path

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["English", "French", "German"]}, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


async def main(model: str) -> None:
    """Constrains the output by a JSON schema, a regular expression and a list of strings."""
    async with penstock.Engine(model) as engine:
        person = await engine.generate(
            [
                {
                    "role": "user",
                    "content": "Describe Marie, who is 34 and speaks French and English, as JSON.",
                }
            ],
            max_tokens=120,
            temperature=0,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        )
        print(json.loads(person.text))
        date = await engine.generate(
            "The first moon landing was on", temperature=0, regex=" [0-9]{4}-[0-9]{2}-[0-9]{2}"
        )
        print(date.text)
        city = await engine.generate(
            [{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            choice=["Rome", "Paris", "Oslo"],
        )
        print(city.text)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
