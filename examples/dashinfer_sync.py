"""DashInfer's offline flow with `sync_request`: `python examples/dashinfer_sync.py [MODEL]`."""

import sys

from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import TargetDevice
from penstock.demo import model_path


def main(model: str) -> None:
    """The model is serialised to temporary files, which are not needed once it is installed."""
    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel(model, "model", in_memory_serialize=True)
    loader.load_model().read_model_config().serialize(engine).free_model()
    builder = loader.create_reference_runtime_config_builder("model", TargetDevice.CPU, [0], max_batch=8)
    config = builder.max_length(256).build()
    engine.install_model(config)
    engine.start_model("model")
    loader.free_memory_serialize_file()

    tokenizer = loader.init_tokenizer().get_tokenizer()
    messages = [{"role": "user", "content": "Who are you?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    generation = loader.create_reference_generation_config_builder(config)
    generation.update({"top_k": 1, "max_length": 96})

    status, handle, queue = engine.start_request_text("model", loader, text, generation)
    print(status.name)
    engine.sync_request("model", handle)
    print(tokenizer.decode(queue.Get().ids_from_generate))
    engine.release_request("model", handle)
    engine.stop_model("model")
    engine.release_model("model")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
