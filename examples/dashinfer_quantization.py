"""Quantised weights and KV cache, DashInfer API: `python examples/dashinfer_quantization.py [MODEL]`."""

import sys
import tempfile

from penstock.compat.dashinfer import allspark
from penstock.compat.dashinfer.allspark import AsCacheMode, TargetDevice
from penstock.demo import model_path

WEIGHTS = {"quant_method": "instant_quant", "weight_format": "int8", "compute_method": "weight_only"}


def main(model: str) -> None:
    """The weights are quantised when they are serialised, the KV cache when the model is installed."""
    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel(model, "model", user_set_data_type="bfloat16")
    with tempfile.TemporaryDirectory() as directory:
        loader.load_model().serialize_to_path(
            engine, directory, enable_quant=True, customized_quant_config=WEIGHTS, skip_if_exists=True
        ).free_model()
        for mode in (AsCacheMode.AsCacheDefault, AsCacheMode.AsCacheQuantI8, AsCacheMode.AsCacheQuantU4):
            builder = loader.create_reference_runtime_config_builder("model", TargetDevice.CPU, [0], 2)
            config = builder.max_length(128).kv_cache_mode(mode).build()
            engine.install_model(config)
            engine.start_model("model")
            generation = loader.create_reference_generation_config_builder(config)
            generation.update({"top_k": 1, "max_length": 24})
            _, handle, queue = engine.start_request_text("model", loader, "Water boils at", generation)
            engine.sync_request("model", handle)
            text = loader.init_tokenizer().get_tokenizer().decode(queue.Get().ids_from_generate)
            print(f"{mode.name}: {text!r}")
            engine.stop_model("model")
            engine.release_model("model")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
