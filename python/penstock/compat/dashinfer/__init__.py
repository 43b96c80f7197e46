"""DashInfer's Python API on Penstock: `from penstock.compat.dashinfer import allspark`.

    engine = allspark.Engine()
    loader = allspark.HuggingFaceModel("path/to/model", "model")
    loader.load_model().serialize(engine, model_output_dir="model_output").free_model()
    builder = loader.create_reference_runtime_config_builder("model", allspark.TargetDevice.CPU, [0], 8)
    config = builder.build()
    engine.install_model(config)
    engine.start_model("model")

    generation_config = loader.create_reference_generation_config_builder(config)
    status, handle, queue = engine.start_request_text("model", loader, "Who are you?", generation_config)
    engine.sync_request("model", handle)
    print(loader.init_tokenizer().get_tokenizer().decode(queue.Get().ids_from_generate))

`pip install ./python/aliases/dashinfer` in Penstock's repository adds the package `dashinfer` with the same
names. docs/dashinfer.md lists the options and the differences.
"""

from penstock import __version__
from penstock.compat.dashinfer import allspark

__all__ = ["__version__", "allspark"]
