"""Map-style datasets whose samples are stored in files.

An index with the position of each sample makes random access possible. The Loader therefore treats
files like any map-style dataset: it supports seeded orders, exact shares, exact resumes, token
budgets and mixtures.

indexed_files.py   `IndexedFiles`: builds, stores and uses the index
json_lines.py      `sw.JsonLines`: one JSON object per line
tar_samples.py     `sw.TarSamples`: tar files in WebDataset's layout
parquet_rows.py    `sw.ParquetRows`: the rows of Parquet files, decoded once
"""
