"""Sets of images: folders, parquet, CIFAR, the datasets library, the embedded digits, synthetic shapes."""
