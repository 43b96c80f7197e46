"""What the tests share: checkpoints they write, the engine run to a result, and the independent oracle."""
