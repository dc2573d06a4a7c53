"""`make gpu-check`: what must hold on a GPU, each check a process of its own, in one table; on machines with torch alone, too."""
