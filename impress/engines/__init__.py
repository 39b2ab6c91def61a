"""Engines that read and write a store while a model runs. Nothing here is imported by the store."""
