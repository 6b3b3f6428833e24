"""Files of samples as map-style datasets.

An index of the position of each sample makes random access possible. So the Loader treats files
like any map-style dataset: a seeded order, exact shares and resumes, token budgets, mixtures.

indexed_files.py   `IndexedFiles`: builds, keeps and uses the index
json_lines.py      `sw.JsonLines`: one JSON object per line
tar_samples.py     `sw.TarSamples`: tar files in WebDataset's layout
parquet_rows.py    `sw.ParquetRows`: the rows of Parquet files, decoded once
"""
