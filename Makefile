# The commands of the README. This file only wraps: cargo and the scripts under tests/ do the work.
# A line `target: ## text` is shown by `make help`.

SHELL := /bin/bash
.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
# two targets of one call would only fight for the same cores and the same build directory
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

CARGO  ?= cargo
# handed on by the environment, so that quotes in it stay as they are
export CMD
PREFIX ?= /usr/local
# Debian's libfabric looks for providers in the multiarch directory; one built from source in $(PREFIX)/lib.
TRIPLET := $(shell gcc -print-multiarch 2>/dev/null)
libdir ?= $(if $(filter /usr,$(PREFIX)),/usr/lib$(if $(TRIPLET),/$(TRIPLET)),$(PREFIX)/lib)
includedir ?= $(PREFIX)/include
mandir ?= $(PREFIX)/share/man

PROVIDER := build/lib/libfabric/libweft-fi.so
BUILT    := $(or $(CARGO_TARGET_DIR),target)/release/libweft_fi.so

all: ## build the provider (release): build/lib/libfabric/libweft-fi.so
	@echo "weft: building the provider into $(PROVIDER)"
	@$(CARGO) build --release -p weft-fi
	@install -D -m 755 $(BUILT) $(PROVIDER)

demo: all deps ## build, list the provider, move data between two processes, print the table
	@tests/tools/demo

# The tiers in the order in which they run. Each is an executable that prints `N passed, N failed, N skipped` last.
TIERS := fast abi mr conformance mpi verbs sanitize fault vm

check: all deps ## every test of every tier; the last line is the total
	@tests/tools/tiers $(TIERS)

check-fast: ## format, clippy, unit tests, models, dependency rules; under five minutes
	@tests/tools/tiers fast

check-loom: ## models of what is shared without a lock, in every order of their steps; OPTIONS=--planted
	@tests/loom/check $(OPTIONS)

check-fuzz: deps ## every fuzz target for some seconds, with AddressSanitizer; not part of `make check`
	@tests/fuzz/check $(if $(SECONDS),--seconds '$(SECONDS)')

TARGET  ?=
fuzz: deps ## one fuzz target, TARGET=stranger, for SECONDS=60
	@test -n "$(TARGET)" || { echo "weft: say which: make fuzz TARGET=NAME SECONDS=60"; exit 2; }
	@tests/fuzz/check --target '$(TARGET)' --seconds '$(or $(SECONDS),60)'

check-sanitize: all deps ## the loaded object under AddressSanitizer; OPTIONS=--long, unit tests, Valgrind and planted bugs too
	@tests/sanitize/check $(OPTIONS)

check-abi: all deps ## the shared object as three releases of libfabric load it, and bad input
	@tests/tools/tiers abi

check-mr: all deps ## the matrix of fi_mr(3), every pair of settings; OPTIONS=--full for all of them
	@tests/mr/check $(OPTIONS)

check-conformance: all deps ## whole programs on the embedded device
	@tests/tools/tiers conformance

check-mpi: all deps ## mpi4py's tests on MPICH and Open MPI over RDM endpoints; OPTIONS=--whole for all modules
	@tests/mpi/check $(OPTIONS)

check-verbs: deps ## other people's verbs programs and rdma-core's tests on the embedded device; OPTIONS=--newer
	@tests/verbs/check $(OPTIONS)

check-fault: all deps ## 4,500 processes killed at random, and at every instruction of each call: hours; OPTIONS="--seed N"
	@tests/fault/check --all $(OPTIONS)

check-vm: all deps ## the same shared object on a real verbs device, in a virtual machine
	@tests/vm/check

vm: all ## run a command in that virtual machine: CMD='fi_info -p weft'
	@test -n "$$CMD" || { echo "weft: say what to run: make vm CMD='fi_info -p weft'"; exit 2; }
	@tests/vm/vm run "$$CMD"

vm-shell: all ## a shell in that virtual machine
	@tests/vm/vm shell

FILTER ?=
bench: all deps ## weft beside libfabric's tcp, shm and verbs and the bare machine, as ratios; FILTER='8 64' OPTIONS='--rounds 31'
	@benches/bench $(OPTIONS) $(FILTER)

bench-count: all deps ## instructions of each call, by callgrind
	@benches/bench count

bench-scale: all deps ## 8 to 256 processes: counts, slopes; 1 to 1,000,000 addresses; OPTIONS='--counts 8,64 --subjects RC'
	@benches/scale $(OPTIONS)

bench-vm: all ## weft beside libfabric's verbs provider in that virtual machine, as ratios; OPTIONS='--test local'
	@tests/vm/bench $(OPTIONS)

check-long: all deps ## what takes longer, about 110 minutes: docs/testing.md; OPTIONS='--step fuzz' for one step
	@tests/tools/long $(OPTIONS)

SUITE ?= msg
PROV  ?= weft
check-fabtests: all deps ## libfabric's own fabtests: SUITE=msg|unit|quick|all|... PROV=weft|tcp|'weft;ofi_rxm'|... [NODE=address]
	@tests/conformance/check-fabtests --suite '$(SUITE)' --prov '$(PROV)' $(if $(NODE),--node '$(NODE)')

install: all ## install provider, header and man page; DESTDIR= PREFIX=
	@echo "weft: installing into $(DESTDIR)$(PREFIX)"
	@install -D -m 755 $(PROVIDER) $(DESTDIR)$(libdir)/libfabric/libweft-fi.so
	@install -D -m 644 include/weft.h $(DESTDIR)$(includedir)/weft.h
	@install -d $(DESTDIR)$(mandir)/man7
	@tests/tools/man docs/man/fi_weft.7.md > $(DESTDIR)$(mandir)/man7/fi_weft.7

uninstall: ## remove what install put there; DESTDIR= PREFIX=
	@echo "weft: removing from $(DESTDIR)$(PREFIX)"
	@rm -f $(DESTDIR)$(libdir)/libfabric/libweft-fi.so $(DESTDIR)$(includedir)/weft.h $(DESTDIR)$(mandir)/man7/fi_weft.7

deps: ## install by apt what the demo and the tests need, if it is missing
	@tests/tools/deps

bindings: ## regenerate the checked-in bindings from the headers of Debian sid
	@tests/tools/bindings

header: ## bring include/weft.h up to date with the exported symbols
	@tests/tools/header

clean: ## remove everything that was built (downloads in the cache stay)
	@echo "weft: removing build products"
	@$(CARGO) clean -q
	@rm -rf build

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

.PHONY: all demo check check-fast check-loom check-fuzz fuzz check-sanitize check-abi check-mr check-conformance check-mpi check-verbs check-fault check-vm vm vm-shell bench bench-count bench-scale bench-vm check-long check-fabtests install uninstall deps bindings header clean help
