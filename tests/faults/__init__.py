"""Faults that happen while people train and translate; `pytest -k test_05` runs the tests of fault 5.

 1  killed during a save: the old or the new checkpoint remains, never a mixture
 2  disk full: the old checkpoint remains, saving is retried, and the error says how much space is missing
 3  one write fails: it is retried
 4  run folder not writable: an error before the first step
 5  checkpoint truncated, emptied or with a flipped bit: detected; the one before it is used
 6  crash with a single checkpoint kept: a valid checkpoint exists at every instant
 7  a second `fit` in the same run folder: refused
 8  killed in the middle of an epoch, with dropout and accumulation: resumes bit for bit
 9  random state or optimizer missing from a checkpoint: an error if named, else the one before it is used
10  corpus or tokenizer changed under a run: an error, or encoded again if nothing was trained
11  another number of threads or ranks: logged; every pair still once per epoch
12  SIGTERM and SIGINT: saved at the end of the step; a second signal acts at once, if there is one process
13  SIGTERM to one of several ranks: all save and stop at the same step
14  a rank is killed or frozen: the others end and name it; the run resumes exactly
15  NaN or infinity: the step is skipped and counted; three in a row end training
16  out of memory: the micro-batch is halved, the gradient is the same
17  one side has a line more than the other: an error with both counts
18  line ends, byte order marks and separators of every kind: pairs never shift
19  invalid UTF-8, NUL bytes: an error with file:line, or the pair is dropped and counted
20  a line of ten megabytes: dropped in training, one line in translation
21  empty and blank lines: empty translations, as many lines as in the input
22  the reader of the output has gone, or the output device is full
23  a config key that does not exist or is out of range
24  empty corpus, all pairs filtered, vocabulary larger than the corpus allows
25  crafted model folder: nothing is executed, no memory is allocated for it
26  missing, additional or non-finite tensors: named
27  a CUDA device that does not exist
28  control characters printed to a terminal: escaped
29  byte pieces that decode to a line break: replaced by a space
33  a rank with another config: an error before the first step that names the rank and the key
34  torchrun restarts ranks that were killed: the run finishes as if nothing had happened (test_torchrun.py)
35  out of memory on one of several ranks: all try again, or end and resume, with smaller micro-batches
38  torchrun restarts a translation: resumed with files, an error with pipes (test_torchrun.py)
39  two commands write one output: one complete result, the other fails (test_outputs.py)
40  YAML whose aliases make it huge or infinite, and types that no key has: a one-line error, at once
41  pipes, devices and folders in place of the files of a run: never waited for, never read to the end
42  a file that is far larger than its kind can be, or than its manifest says: refused before it is read
43  control characters of files, names and models: escaped in everything that a terminal shows
44  a line of gigabytes, even if compressed: bounded memory, and handled like a line that is not valid text
45  a worker process that is stopped: reported, waited for until Ctrl-C (test_pool.py, test_workers.py)
46  files of a run folder lost or linked: what is missing is named, links are followed or refused
47  signals of closed terminals and batch systems: handled like SIGTERM, exit code 128 + number
49  the umask decides who can read what commands write (test_outputs.py)
"""
