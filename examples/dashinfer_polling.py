"""DashInfer's asynchronous flow, several requests at once: `python examples/dashinfer_polling.py [MODEL]`."""

import sys

from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import GenerateRequestStatus, TargetDevice
from penstock.demo import model_path

PROMPTS = ("Water boils at", "Water freezes at", "The largest planet is")
ENDED = (GenerateRequestStatus.GenerateFinished, GenerateRequestStatus.GenerateInterrupted)


def main(model: str) -> None:
    """Each request has a queue, which collects its tokens until they are read."""
    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel(model, "model").load_model().serialize_to_memory(engine)
    builder = loader.create_reference_runtime_config_builder("model", TargetDevice.CPU, [0], max_batch=8)
    config = builder.max_length(128).build()
    engine.install_model(config)
    engine.start_model("model")
    loader.free_memory_serialize_file()

    generation = loader.create_reference_generation_config_builder(config)
    generation.update({"top_k": 1, "max_length": 32})
    requests = [engine.start_request_text("model", loader, prompt, generation) for prompt in PROMPTS]
    tokenizer = loader.init_tokenizer().get_tokenizer()
    for prompt, (_, handle, queue) in zip(PROMPTS, requests, strict=True):
        print(prompt, end="", flush=True)
        while True:
            elements = queue.Get()
            if elements:
                print(tokenizer.decode(elements.ids_from_generate), end="", flush=True)
            if queue.GenerateStatus() in ENDED:
                break
        print(f" [{queue.GeneratedLength()} tokens]")
        engine.release_request("model", handle)
    engine.stop_model("model")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
