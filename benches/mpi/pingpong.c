/*
 * Ping-pong between two MPI processes: prints, for each size, the nanoseconds of a message one way.
 * The payload is checked once for each size.
 *
 * usage: pingpong MILLISECONDS SIZE...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank;

static void die(const char *what)
{
	fprintf(stderr, "pingpong: %s\n", what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static void rounds(char *out, char *in, int size, long count)
{
	for (long i = 0; i < count; i++) {
		if (rank == 0) {
			MPI_Send(out, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
			MPI_Recv(in, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(in, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(out, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
		}
	}
}

/* The number of round trips in that time, the same in both processes. */
static long enough(char *out, char *in, int size, double seconds)
{
	long count = 16;

	for (;;) {
		double begin = MPI_Wtime();
		rounds(out, in, size, count);
		double took = MPI_Wtime() - begin;
		MPI_Bcast(&took, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
		if (took > seconds / 10)
			return (long)((double)count * seconds / took) + 1;
		count *= 4;
	}
}

int main(int argc, char **argv)
{
	int ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2 || argc < 3)
		die("two processes; pingpong MILLISECONDS SIZE...");
	for (int i = 2; i < argc; i++) {
		int size = atoi(argv[i]);
		char *out = malloc((size_t)size), *in = calloc(1, (size_t)size);
		if (size <= 0 || !out || !in)
			die("a size is bad");
		memset(out, 17 + rank, (size_t)size);
		rounds(out, in, size, 1);
		for (int at = 0; at < size; at++)
			if (in[at] != 17 + !rank)
				die("a byte is wrong");
		long count = enough(out, in, size, atof(argv[1]) / 1000);
		MPI_Barrier(MPI_COMM_WORLD);
		double begin = MPI_Wtime();
		rounds(out, in, size, count);
		double took = MPI_Wtime() - begin;
		if (rank == 0)
			printf("%d %.1f\n", size, took / (double)count / 2 * 1e9);
		free(out);
		free(in);
	}
	MPI_Finalize();
	return 0;
}
