"""A training of a second, for scripts that compare how processes are started."""

CONFIG = """
[model]
vocabulary = 300
features = 16
heads = 2
hidden = 32
blocks = 1
dropout = 0.1
[data]
sequence = 8
[pipeline]
stages = 2
micro_batches = 3
timeout_s = 60
[train]
steps = 6
mini_batch = 7
validation_tokens = 100
"""


def write(folder, config=CONFIG, lines=3000):
    """Writes `tiny.toml` and the text that it learns from, `text.txt`."""
    config = config.replace("[data]\n", '[data]\ntext = ["text.txt"]\n')
    (folder / "tiny.toml").write_text(config)
    (folder / "text.txt").write_text("".join(f"stage {n * n % 89} sends to stage {n}.\n"
                                             for n in range(lines)))
