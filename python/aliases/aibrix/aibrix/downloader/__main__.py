"""`python -m aibrix.downloader`: the same as `penstock download`."""

from penstock.runtime.downloader.command import download

if __name__ == "__main__":
    download(prog_name="python -m aibrix.downloader")
