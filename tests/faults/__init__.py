"""What goes wrong while people train, one test or more for each, found by its number: `pytest -k test_05`.

 1  killed during a save: the old checkpoint or the new one, never a mixture
 2  disk full: the old checkpoint stays, saving is tried again, and what room is missing is told
 3  one write fails: tried again
 4  a run folder that cannot be written: an error before the first step
 5  a checkpoint truncated, emptied or with a flipped bit: noticed; the one before it serves
 6  a crash with one checkpoint kept: a valid one at every instant
 7  two `fit`s in one run folder: the second is refused
 8  killed in the middle of an epoch, dropout and accumulation on: goes on bit for bit
 9  generators or optimizer missing from a checkpoint: refused by name; else the one before it serves
10  corpus or tokenizer changed under a run: refused, or encoded again where nothing was trained
11  another number of threads: told; every pair still once an epoch
12  SIGTERM and SIGINT: saved at the end of the step; a second one acts at once
15  NaN or infinity: the step is skipped and counted; three in a row end training
16  out of memory: the pass is halved, the gradient is the same
17  one side has a line more than the other: an error with both counts
18  line ends, marks and separators of every kind: never a shifted pair
19  bytes that are no UTF-8, NUL: an error with file:line, or the pair is dropped and counted
20  a line of ten megabytes: dropped in training, one line in translation
21  empty and blank lines: empty translations, as many lines as came in
22  whoever read the output has gone; the output is full
23  a key of the config that does not exist or is out of range
24  no text, nothing left of it, too little for the vocabulary
25  a model folder that is crafted: nothing is executed, nothing allocated
26  tensors that are missing, too many or not finite: named
27  a CUDA device that is not there
28  control characters on their way to a terminal: escaped
29  byte pieces that spell a line break: a space
"""
