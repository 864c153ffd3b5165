"""Raw files, from the config to pairs of texts.

`files` finds the files of a corpus. `blocks` cuts a corpus of any kind into blocks of pairs, tables with
`parquet`. `records` decodes the blocks, and lines with `lines`. `digests` hashes the files and notices when
they change.
"""
