"""Output that matches a JSON schema, with the DashInfer API: `python examples/dashinfer_json.py [MODEL]`."""

import json
import sys

from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import TargetDevice
from penstock.demo import model_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}


def main(model: str) -> None:
    """`response_format` has the type `json_object` and the schema as text."""
    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel(model, "model").load_model().serialize_to_memory(engine)
    builder = loader.create_reference_runtime_config_builder("model", TargetDevice.CPU, [0], max_batch=1)
    config = builder.max_length(512).build()
    engine.install_model(config)
    engine.start_model("model")
    loader.free_memory_serialize_file()

    tokenizer = loader.init_tokenizer().get_tokenizer()
    messages = [{"role": "user", "content": "Invent a person, as JSON with name and age."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    generation = loader.create_reference_generation_config_builder(config)
    generation.update(
        {"top_k": 1, "response_format": {"type": "json_object", "json_schema": json.dumps(SCHEMA)}}
    )
    _, handle, queue = engine.start_request_text("model", loader, text, generation)
    engine.sync_request("model", handle)
    print(json.loads(tokenizer.decode(queue.Get().ids_from_generate, skip_special_tokens=True)))
    engine.release_request("model", handle)
    engine.stop_model("model")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
