// SPDX-License-Identifier: Apache-2.0

// Package patchbay is a thin client of Patchbay, which controls the static keys and tracepoints of
// a running Linux guest from the guest's host.
//
// Answers are the messages of patchbay.v1, so that fields and enum values of a newer service are
// kept. Every failed call is an *Error with the service's reason.
package patchbay

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "patchbay.example/go/v1"
)

// DefaultSocket is the socket of patchbayd.
const DefaultSocket = "/run/patchbayd/patchbayd.sock"

// maxAnswer is the service's limit of 4 MiB, with room for the frame.
const maxAnswer = 5 << 20

// Host is a connection to an endpoint, which serves one guest or all guests of a host.
type Host struct {
	conn   *grpc.ClientConn
	guests pb.GuestServiceClient
}

// TLS names the files of mutual TLS, all in PEM format.
type TLS struct {
	CA, Cert, Key string
	// ServerName is the name in the host's certificate. It is needed only if it differs from the name
	// in the address.
	ServerName string
}

// Connect prepares a connection to a unix socket. An empty path stands for $PATCHBAY_SOCKET or, if
// that is not set, for DefaultSocket. The first call makes the connection.
func Connect(path string, options ...grpc.DialOption) (*Host, error) {
	if path == "" {
		path = os.Getenv("PATCHBAY_SOCKET")
	}
	if path == "" {
		path = DefaultSocket
	}
	path, err := filepath.Abs(strings.TrimPrefix(path, "unix:"))
	if err != nil {
		return nil, err
	}
	return dial("unix://"+path, append(options,
		grpc.WithTransportCredentials(insecure.NewCredentials())))
}

// ConnectTLS prepares a connection to "HOST:PORT" with mutual TLS.
func ConnectTLS(address string, files TLS, options ...grpc.DialOption) (*Host, error) {
	cert, err := tls.LoadX509KeyPair(files.Cert, files.Key)
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(files.CA)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate in PEM", files.CA)
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{cert},
		RootCAs:      roots,
		ServerName:   files.ServerName,
		MinVersion:   tls.VersionTLS12,
	}
	return dial(address, append(options,
		grpc.WithTransportCredentials(credentials.NewTLS(config))))
}

func dial(target string, options []grpc.DialOption) (*Host, error) {
	options = append(options,
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)),
		grpc.WithChainUnaryInterceptor(unaryErrors),
		grpc.WithChainStreamInterceptor(streamErrors))
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		return nil, err
	}
	return &Host{conn: conn, guests: pb.NewGuestServiceClient(conn)}, nil
}

// Close ends the connection and its streams.
func (h *Host) Close() error { return h.conn.Close() }

// Guests lists the endpoint's guests, ordered by name; patterns are globs.
func (h *Host) Guests(ctx context.Context, patterns ...string) iter.Seq2[*pb.GuestStatus, error] {
	return pages(func(token string) ([]*pb.GuestStatus, string, error) {
		request := pb.ListGuestsRequest{Patterns: patterns, PageToken: token}
		answer, err := h.guests.ListGuests(ctx, &request)
		return answer.GetGuests(), answer.GetNextPageToken(), err
	})
}

// Guest returns the guest with this name. An empty name stands for the only guest of the endpoint.
func (h *Host) Guest(name string) *Guest {
	return &Guest{
		Name:        name,
		Guests:      h.guests,
		Keys:        pb.NewStaticKeysServiceClient(h.conn),
		Tracepoints: pb.NewTracepointsServiceClient(h.conn),
	}
}

// maxPages and maxBytes limit one list. The service decides where a list ends, and a faulty service
// must not exhaust this program's memory.
const (
	maxPages = 1000
	maxBytes = 64 << 20
)

// budget counts the pages and bytes that have been received of one list.
type budget struct{ pages, bytes int }

// spend counts a page of `items` bytes that was requested with `token`. It fails if the list
// exceeds a limit, or if the token of the next page is the same.
func (b *budget) spend(items int, token, next string) error {
	b.pages++
	b.bytes += items
	if next == "" || next != token && b.pages < maxPages && b.bytes <= maxBytes {
		return nil
	}
	return status.Errorf(codes.ResourceExhausted,
		"the service's list does not end: %d pages or %d bytes are the most, and no page may follow itself; give narrower patterns",
		maxPages, maxBytes)
}

// sizeOf returns the encoded size of messages, in bytes.
func sizeOf[T proto.Message](items []T) int {
	size := 0
	for _, item := range items {
		size += proto.Size(item)
	}
	return size
}

// pages yields the items of all pages, and stops at the first error.
func pages[T proto.Message](page func(token string) ([]T, string, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var budget budget
		for token := ""; ; {
			items, next, err := page(token)
			if err == nil {
				err = wrap(budget.spend(sizeOf(items), token, next))
			}
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			token = next
		}
	}
}

// stream yields the messages that the service sends. It stops at the first error. It stops without
// an error when ctx is cancelled, the service ends the stream, or the caller leaves the loop.
func stream[T any](
	ctx context.Context,
	open func(context.Context) (grpc.ServerStreamingClient[T], error),
) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		call, err := open(ctx)
		for err == nil {
			var message *T
			if message, err = call.Recv(); err == nil && !yield(message, nil) {
				return
			}
		}
		if !errors.Is(err, io.EOF) && ctx.Err() != context.Canceled {
			yield(nil, err)
		}
	}
}

// Collect returns all items of a list, or the first error.
func Collect[T any](items iter.Seq2[T, error]) ([]T, error) {
	var all []T
	for item, err := range items {
		if err != nil {
			return all, err
		}
		all = append(all, item)
	}
	return all, nil
}
