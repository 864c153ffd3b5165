"""Raw files, from the config to pairs of texts.

`files` finds the files of a corpus. `blocks` cuts a corpus of any kind into blocks of pairs: files of lines
with `line_blocks`, tables with `parquet`. `parse` decodes the blocks: lines with `lines`, fields in quotes
with `quotes`. `digests` hashes the files and notices when they change.
"""
