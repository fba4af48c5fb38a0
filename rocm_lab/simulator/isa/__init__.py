"""The instructions that Triton emits for gfx942 and gfx950, a file for each group, each with a table of its semantics.

Named in each file: the chapter of AMD's ISA documents ("AMD Instinct MI300 Instruction Set Architecture" for gfx942,
"AMD Instinct CDNA4 Instruction Set Architecture" for gfx950) that it follows.
"""
