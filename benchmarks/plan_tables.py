"""Published tables that predictions are compared with: the papers' numbers, nothing computed.

The string above each table names the fields of its rows.
"""

ZERO = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}
"""Rajbhandari et al. (2020), table 1: GB by ranks, of ZERO_1, ZERO_2 and ZERO_3, for each size."""

ZERO_SIZES = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)

SC21_FIELDS = "billions heads hidden layers tensor pipeline gpus batch teraflops"
SC21 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
"""Narayanan et al. (2021), table 1: sequences of 2048, 51200 words, A100."""

SC21_ZERO_FIELDS = "billions gpus batch micro teraflops"
SC21_ZERO = (
    (174.6, 384, 1536, 4, 144),
    (174.6, 768, 1536, 2, 88),
    (174.6, 1536, 1536, 1, 44),
    (529.6, 640, 2560, 4, 138),
    (529.6, 1120, 2240, 2, 98),
    (529.6, 2240, 2240, 1, 48),
)
"""The same paper, table 2: ZeRO-3 without model parallelism."""

SC21_THEIRS_FIELDS = "billions gpus batch micro tensor pipeline teraflops"
SC21_THEIRS = (
    (174.6, 384, 1536, 1, 8, 12, 153),
    (174.6, 768, 1536, 1, 8, 12, 149),
    (174.6, 1536, 1536, 1, 8, 12, 141),
    (529.6, 560, 2240, 1, 8, 35, 171),
    (529.6, 1120, 2240, 1, 8, 35, 167),
    (529.6, 2240, 2240, 1, 8, 35, 159),
)
"""The same paper, table 2: tensor 8 with a pipeline of 12, and of 35."""

KORTHIKANTI_FIELDS = (
    "name heads hidden layers pipeline interleaved gpus batch micro full new kept_gib new_gib "
    "sequence selective both recomputed"
)
KORTHIKANTI = (
    ("22B", 64, 6144, 48, 1, 1, 8, 4, 4, 1.42, 1.10, 59.25, 9.56, 66.84, 49.42, 16.18, 7.64),
    ("175B", 96, 12288, 96, 8, 3, 64, 64, 1, 18.13, 13.75, 66.84, 12.35, 62.04, 56.53, 18.49, 8.71),
    ("530B", 128, 20480, 105, 35, 3, 280, 280, 1, 49.05, 37.83, 114.02, 23.08,
     58.31, 62.04, 20.27, 9.42),
    ("1T", 160, 25600, 128, 64, 1, 512, 512, 1, 94.42, 71.49, 131.25, 26.56,
     58.31, 62.04, 20.27, 9.42),
)  # fmt: skip
"""Korthikanti et al. (2022), figures 1 and 7 and table 5: seconds of a step with all recomputed and
with their two methods; GiB of activations of the first stage without anything and with both; what
of it is left, in percent. Tensor 8."""

LLAMA3_FIELDS = "gpus tensor context pipeline data sequence per_data teraflops"
LLAMA3 = (
    (8192, 8, 1, 16, 64, 8192, 32, 430),
    (16384, 8, 1, 16, 128, 8192, 16, 400),
    (16384, 8, 16, 16, 8, 131072, 16, 380),
)
"""Llama team (2024), table 4: 405B on H100; sequences of a data rank in a step."""

MEGASCALE_FIELDS = "batch gpus megatron megascale"
MEGASCALE = (
    (768, 256, 40.0, 32.0),
    (768, 512, 21.2, 16.5),
    (768, 768, 15.2, 11.5),
    (768, 1024, 11.9, 8.9),
    (6144, 3072, 29.02, 23.66),
    (6144, 6144, 14.78, 12.21),
    (6144, 8192, 12.24, 9.56),
    (6144, 12288, 8.57, 6.34),
)
"""Jiang et al. (2024), table 2: 175B, seconds of a step; tensor 8, pipeline 8, 6 interleaved."""

TORCHTITAN = (
    ("8B", 128, 67.0),
    ("8B", 8, 82.4),
    ("8B, compiled", 128, 62.0),
    ("8B, compiled", 8, 77.0),
)
"""Liang et al. (2024): GiB of an H100 at the peak, by devices: FSDP, two sequences of 8192 each,
selective recomputation."""
