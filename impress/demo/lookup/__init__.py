"""A small model that really looks things up, and the tasks it was trained for.

`tasks` generates unseen documents and questions, `tokenizer` turns words into token ids and back.
The checkpoints lie beside them: `agreeing/` and `specialised/` (OPT) and, only in a clone,
`grouped/` (Llama, 8 query heads on 2 KV heads), each config.json and model.safetensors; they are
made by experiments/lookup_model/train.py.
"""
