"""Raw files, from the config to pairs of texts.

`files` finds the files of a corpus. `blocks` cuts a corpus of any kind into blocks of pairs and decodes them,
with `lines` for files of lines, and with `parquet` for tables. `records` finds the pair in a line of TSV or
JSONL, or in a row of a table. `digests` hashes the files and notices when they change.
"""
