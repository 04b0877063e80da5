#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *survive_mode = "send";

static const struct {
	const char *name;
	int (*run)(const struct options *);
} tests[] = {
	{"transfer", test_transfer}, {"survive", test_survive}, {"watch", test_watch},
	{"bench", test_bench},	     {"register", test_register}, {"atomic", test_atomic},
	{"advise", test_advise},     {"refresh", test_refresh},
	{"unregistered", test_unregistered}, {"local", test_local},
	{"reads", test_reads},	     {"connect", test_connect}, {"count", test_count},
	{"durable", test_durable},   {"rejected", test_rejected},
};

int main(int argc, char **argv)
{
	struct options opt = {.port = "18515", .iterations = 3, .size = 65536, .seconds = 10};
	int c;
	setvbuf(stdout, NULL, _IOLBF, 0);
	while ((c = getopt(argc, argv, "sp:d:P:n:z:T:m:")) != -1) {
		switch (c) {
		case 's': opt.server = 1; break;
		case 'p': opt.provider = optarg; break;
		case 'd': opt.domain = optarg; break;
		case 'P': opt.port = optarg; break;
		case 'n': opt.iterations = atoi(optarg); break;
		case 'z': opt.size = strtoul(optarg, NULL, 0); break;
		case 'T': opt.seconds = atof(optarg); break;
		case 'm': survive_mode = optarg; break;
		default: return 2;
		}
	}
	if (argc - optind != 2) {
		fprintf(stderr, "usage: fipeer [-s] [-p provider] [-d domain] [-P port] [-n iterations] [-z bytes] [-T seconds] "
				"[-m send|write|recv|read] transfer|survive|watch|bench|register|atomic|advise|refresh|unregistered|local|reads|connect|count|durable|rejected ADDRESS\n");
		return 2;
	}
	opt.test = argv[optind];
	opt.address = argv[optind + 1];
	for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
		if (!strcmp(tests[i].name, opt.test))
			return tests[i].run(&opt);
	fprintf(stderr, "no test %s\n", opt.test);
	return 2;
}
