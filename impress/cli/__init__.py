"""The `impress` command. Light: nothing here imports torch until a model is run."""
