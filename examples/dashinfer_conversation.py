"""A conversation with DashInfer's prefix cache: `python examples/dashinfer_conversation.py [MODEL]`."""

import sys

from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import TargetDevice
from penstock.demo import model_path

QUESTIONS = ("Name a river in Africa.", "Which sea does it flow into?", "Name a city on its banks.")


def main(model: str) -> None:
    """Each prompt repeats the earlier turns; the prefix cache has their blocks."""
    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel(model, "model").load_model().serialize_to_memory(engine)
    builder = loader.create_reference_runtime_config_builder("model", TargetDevice.CPU, [0], max_batch=1)
    config = builder.max_length(1024).kv_cache_span_size(16).prefill_cache(enable=True).build()
    engine.install_model(config)
    engine.start_model("model")
    loader.free_memory_serialize_file()

    tokenizer = loader.init_tokenizer().get_tokenizer()
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        length = len(tokenizer.encode(text))
        generation = loader.create_reference_generation_config_builder(config)
        generation.update({"top_k": 1, "max_length": length + 40})
        _, handle, queue = engine.start_request_text("model", loader, text, generation)
        engine.sync_request("model", handle)
        elements = queue.Get()
        answer = tokenizer.decode(elements.ids_from_generate, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"{question} {answer!r}")
        print(f"  {length} prompt tokens, {elements.prefix_cache_len} of them cached")
        engine.release_request("model", handle)
    engine.stop_model("model")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
